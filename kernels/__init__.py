# Imported as fpquant.kernels, this file does nothing. With the root of the repository on sys.path (a notebook opened
# there, PYTHONPATH=.), it is also what `import kernels` finds, a name that belongs to another distribution, which
# transformers imports: then hand the name to its owner, where that is installed.
if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import pathlib
    import sys

    root = pathlib.Path(__file__).resolve().parent.parent
    others = [entry for entry in sys.path if pathlib.Path(entry).resolve() != root]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])
