"""The demo model that ships inside the package, and the code that made it.

Called by the command line, the examples and the tests, which need a real checkpoint without any download.
Nothing goes in; the path of the folder with `config.json`, tokenizer and weights comes out.
"""

from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """Return the folder of the demo checkpoint, in a source tree as in an installed wheel."""
    return Path(__file__).resolve().parent
