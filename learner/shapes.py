"""Shape checks for pure functions: jaxtyping's annotations, enforced by beartype while JAX traces.

Decorate functions, never whole packages: JAX rebuilds dataclasses with tracers, and the check would refuse them. Numbers
annotated `float` or `int` are constants of the compiled function (bind them with `partial`); what may be traced is an array of
shape "".
"""

from __future__ import annotations

from beartype import beartype
from jaxtyping import jaxtyped

shaped = jaxtyped(typechecker=beartype)
