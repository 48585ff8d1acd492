"""The evaluation service: a Ray Serve application that pins, generates, scores, records and cleans up."""
