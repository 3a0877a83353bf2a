# Nothing here is for Python: other modules use it by borrow.pxd.
