"""The only place where a C pointer exists. Import order: engine, handles, view, work, ops."""
