from pynccl._native.abi cimport CUresult, ncclResult_t, pn_device_t, pn_engine_t

cdef class Engine:
    cdef pn_engine_t *c
    cdef readonly str name
    cdef readonly bint is_cuda
    cdef int usable(self) except -1
    cdef pn_device_t *device(self, int ordinal) except NULL

cdef int check_nccl(Engine engine, ncclResult_t result, const char *function) except -1
cdef int check_cuda(Engine engine, CUresult result, const char *function) except -1
cdef object nccl_exception(int result, str function, str what, str detail)
cdef object cuda_exception(Engine engine, int result, str function, str what)
