"""Stand-ins for CUDA-only modules that SGLang's CPU path imports and never calls to serve a dense model.

`sgl_kernel`, `torchvision` and `triton` beside this file are this one module under three names. Every submodule can be
imported and every public name exists. While modules are imported a name may be subclassed, used as a decorator, or
(in triton) be called as a constructor; whatever would compute raises. Only the engine's own process sees this folder.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types


def _refuse(name):
    raise RuntimeError(f"{name} is a stand-in that holds no code: it needs a GPU, or an option that the CPU engine lacks")


class _Meta(type):
    """Classes whose attributes are classes of the same kind, and that triton's decorators can be made of."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args, **kwargs):
        if not cls.__module__.startswith("triton") and cls.__name__ not in _CONSTRUCTED:
            _refuse(f"{cls.__module__}.{cls.__name__}")
        return type.__call__(cls, *args, **kwargs)


class _Base(metaclass=_Meta):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and (callable(args[0]) or isinstance(args[0], _Base)):
            return args[0]  # `@triton.autotune(...)` over `@triton.jit`
        return _refuse(f"{type(self).__module__}.{type(self).__name__}")

    def __getitem__(self, grid):
        return _refuse(f"{type(self).__module__}.{type(self).__name__}")


_CONSTRUCTED = {"ScalarType"}


def _name(module, name):
    base = Exception if name.endswith("Error") else _Base
    return type(base)(name, (base,), {"__module__": module})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every submodule of a stand-in another one."""

    def __init__(self, root):
        self.root = root + "."

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self.root):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        _fill(module)


def _fill(module):
    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(module.__name__, name)
        setattr(module, name, value)
        return value

    module.__getattr__ = get
    module.__path__ = []
    if module.__name__ == "torchvision.transforms":
        module.InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


def install(name):
    """Make the module `name`, which is being imported, a stand-in."""
    sys.meta_path.append(_Finder(name))
    _fill(sys.modules[name])
    sys.modules[name].__version__ = "0"
