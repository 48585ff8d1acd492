"""A stand-in: see _standin.py."""

from _standin import install

install(__name__)
