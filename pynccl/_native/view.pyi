# Nothing here is for Python: other modules use it by view.pxd.
