"""The pool for what a context has beside its pages: pages of layers with windows (`windows.py`), or a state of recurrent layers
(`states.py`). A model has one of the two at most, and without either the pool for windows, which is not used then.

Both have the same methods, so that the manager and the scheduler know no difference: what layers keep of a context can go on
at one place only, takes device slots that are found, shared by counting references and given back, moves to the host with the
context's last page, and is left behind at checkpoints, from which other contexts go on.
"""

from jinfercept.kv.states import StatePool
from jinfercept.kv.windows import WindowPool

type SidePool = WindowPool | StatePool
