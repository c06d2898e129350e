"""The embedded engine: serves the learner's own model over the part of SGLang's native HTTP API that Polyturn uses."""
