# Every C name that the extensions use, and no logic.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "abi/nccl_abi.h" nogil:
    ctypedef int ncclResult_t
    ctypedef struct ncclUniqueId:
        char internal[128]
    ctypedef struct ncclConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int blocking
        int cgaClusterSize
        int minCTAs
        int maxCTAs
        const char *netName
        int splitShare
        int trafficClass
        const char *commName
        int collnetEnable
        int CTAPolicy
        int shrinkShare
        int nvlsCTAs
        int nChannelsPerNetPeer
        int nvlinkCentricSched
        int graphUsageMode
        int numRmaCtx
        int maxP2pPeers
        int graphStreamOrdering
        int launchOrderImplicit
        int numRmaSig
        int rmaEagerInit
        int hostCftMode
        int nvlsHostMode
    ctypedef struct ncclCollConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int minCTAs
        int maxCTAs
        int nvlsCTAs
        int cgaClusterSize
        const char *algSelection
        int forceAlgSelection
        int CTAPolicy
        uint64_t userProfilerTag
    ctypedef struct ncclWaitSignalDesc_t:
        int opCnt
        int peer
        int sigIdx
        int ctx
    int NCCL_API_MAGIC
    int NCCL_ABI_VERSION
    int NCCL_CONFIG_UNDEF_INT
    int NCCL_SPLIT_NOCOLOR
    int NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING

cdef extern from "abi/cuda_abi.h" nogil:
    ctypedef int CUresult
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef void *CUcontext
    ctypedef void *CUstream
    ctypedef void *CUevent
    ctypedef struct CUuuid:
        char bytes[16]
    ctypedef int CUstreamCaptureStatus
    ctypedef int CUpointer_attribute
    int CUDA_SUCCESS
    int CUDA_ERROR_NOT_READY
    int CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    int CU_STREAM_NON_BLOCKING
    int CU_EVENT_DEFAULT
    int CU_EVENT_DISABLE_TIMING
    int CU_STREAM_CAPTURE_STATUS_NONE
    int CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    int CU_MEMORYTYPE_HOST

cdef extern from "abi/dlpack_abi.h" nogil:
    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor
    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id
    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct DLTensor:
        void *data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void (*deleter)(DLManagedTensor *self) noexcept nogil
    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void (*deleter)(DLManagedTensorVersioned *self) noexcept nogil
        uint64_t flags
        DLTensor dl_tensor
    ctypedef int DLDeviceType
    ctypedef struct DLPackExchangeAPIHeader:
        DLPackVersion version
        DLPackExchangeAPIHeader *prev_api
    ctypedef struct DLPackExchangeAPI:
        DLPackExchangeAPIHeader header
        int (*managed_tensor_from_py_object_no_sync)(
            void *py_object, DLManagedTensorVersioned **out
        ) except? -1
        int (*managed_tensor_to_py_object_no_sync)(
            DLManagedTensorVersioned *tensor, void **out_py_object
        ) except? -1
        int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out) except? -1
        int (*current_work_stream)(
            DLDeviceType device_type, int32_t device_id, void **out
        ) except? -1
    int kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged
    int kDLInt, kDLUInt, kDLFloat, kDLOpaqueHandle, kDLBfloat, kDLComplex, kDLBool
    int kDLFloat8_e3m4, kDLFloat8_e4m3, kDLFloat8_e4m3b11fnuz, kDLFloat8_e4m3fn
    int kDLFloat8_e4m3fnuz, kDLFloat8_e5m2, kDLFloat8_e5m2fnuz, kDLFloat8_e8m0fnu
    int kDLFloat6_e2m3fn, kDLFloat6_e3m2fn, kDLFloat4_e2m1fn
    uint64_t DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_FLAG_BITMASK_IS_COPIED
    uint64_t DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED

cdef extern from "bind/bind.h" nogil:
    ctypedef void *ncclComm_t
    ctypedef void *ncclWindow_t
    ctypedef struct pn_nccl_t:
        ncclResult_t (*ncclGetUniqueId)(ncclUniqueId *uniqueId) noexcept nogil
        const char *(*ncclGetErrorString)(ncclResult_t result) noexcept nogil
        const char *(*ncclGetLastError)(ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclParamGetParameter)(
            const char *key, const char **value, int *valueLen
        ) noexcept nogil
    ctypedef struct pn_cuda_t:
        CUresult (*cuInit)(unsigned int flags) noexcept nogil
        CUresult (*cuGetErrorName)(CUresult error, const char **text) noexcept nogil
        CUresult (*cuGetErrorString)(CUresult error, const char **text) noexcept nogil
        CUresult (*cuDeviceGetCount)(int *count) noexcept nogil
        CUresult (*cuDeviceGet)(CUdevice *device, int ordinal) noexcept nogil
        CUresult (*cuDeviceGetName)(char *name, int len, CUdevice dev) noexcept nogil
        CUresult (*cuDeviceGetUuid_v2)(CUuuid *uuid, CUdevice dev) noexcept nogil
        CUresult (*cuDeviceGetPCIBusId)(char *pciBusId, int len, CUdevice dev) noexcept nogil
        CUresult (*cuCtxGetStreamPriorityRange)(int *least, int *greatest) noexcept nogil
        CUresult (*cuStreamCreateWithPriority)(
            CUstream *stream, unsigned int flags, int priority
        ) noexcept nogil
        CUresult (*cuCtxSetCurrent)(CUcontext ctx) noexcept nogil
        CUresult (*cuCtxGetDevice)(CUdevice *device) noexcept nogil
        CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext *ctx) noexcept nogil
        CUresult (*cuStreamIsCapturing)(
            CUstream stream, CUstreamCaptureStatus *status
        ) noexcept nogil
        CUresult (*cuPointerGetAttribute)(
            void *value, CUpointer_attribute attribute, CUdeviceptr ptr
        ) noexcept nogil
    ctypedef struct pn_engine_t:
        pn_nccl_t nccl
        pn_cuda_t cuda
        int nccl_version
        int driver_version
    pn_engine_t *pn_engine_open(
        const char *nccl_path, const char *cuda_path, char *why, size_t why_size
    )
    int pn_nccl_since(const char *name)
    void *pn_engine_symbol(const pn_engine_t *engine, const char *name)
    const char *pn_engine_path(const pn_engine_t *engine, const char *name)

    ctypedef enum pn_kind_t:
        PN_ALL_REDUCE, PN_REDUCE, PN_BROADCAST, PN_ALL_GATHER, PN_REDUCE_SCATTER,
        PN_ALL_TO_ALL, PN_GATHER, PN_SCATTER, PN_SEND, PN_RECV, PN_BARRIER,
        PN_ALL_GATHER_V, PN_ALL_TO_ALL_V, PN_REDUCE_SCATTER_V, PN_GATHER_V, PN_SCATTER_V,
        PN_PUT, PN_SIGNAL, PN_WAIT_SIGNAL, PN_INIT, PN_SPLIT, PN_CLOSE, PN_REGISTER,
        PN_DEREGISTER, PN_ABORT, PN_EVENT, PN_KINDS
    ctypedef enum pn_source_t:
        PN_OK, PN_FROM_NCCL, PN_FROM_CUDA, PN_FROM_DEADLINE, PN_FROM_ABORT, PN_FROM_COMM,
        PN_FROM_CLOSED, PN_FROM_MISSING
    ctypedef struct pn_outcome_t:
        pn_source_t source
        int code
        const char *function
    ctypedef struct pn_mailbox_t:
        int fd
    ctypedef struct pn_wait_t:
        pn_wait_t *next
        pn_mailbox_t *box
        void *token
    ctypedef struct pn_device_t:
        pn_engine_t *engine
        int ordinal
        CUdevice device
        CUcontext context
        bint has_memory_waits
        int in_flight
    ctypedef struct pn_enter_t:
        pass
    ctypedef enum pn_state_t:
        PN_NEW, PN_READY, PN_CLOSING, PN_FAILED, PN_ABORTING, PN_GONE
    ctypedef struct pn_clique_t:
        int members
    ctypedef struct pn_comm_t:
        pn_device_t *device
        int rank
        int size
        CUstream stream
        pn_clique_t *clique
        bint ordered
        pn_state_t state
        uint64_t seq
        pn_outcome_t failure
        uint64_t culprit
        int32_t culprit_kind
        int64_t failed_ns
        char detail[1024]
    ctypedef struct pn_uneven_t
    ctypedef struct pn_op_t:
        pn_comm_t *comm
        void *owner
        const void *send
        void *recv
        size_t count
        int32_t datatype
        int32_t redop
        int32_t root
        int32_t kind
        size_t nbytes
        CUstream stream
        int64_t deadline_ns
        bint has_stream
        bint may_wait
        const ncclCollConfig_t *config
        CUevent timed[2]
        uint64_t seq
        int64_t issued_ns
        int64_t ended_ns
        pn_outcome_t outcome
        char *detail
        pn_op_t *next_done
        pn_op_t *next_parting
        pn_uneven_t *uneven
        void *argument
    ctypedef struct pn_link_t:
        pass
    void pn_link_init(pn_link_t *link)
    ctypedef struct pn_control_t:
        ncclUniqueId id
        int color
        int key
        ncclConfig_t *config
        pn_comm_t *child
        bint member

    pn_device_t *pn_device_get(pn_engine_t *engine, int ordinal, pn_outcome_t *why)
    CUresult pn_enter(pn_device_t *device, pn_enter_t *saved)
    void pn_leave(pn_device_t *device, pn_enter_t *saved)

    pn_comm_t *pn_comm_new(pn_device_t *device, int rank, int size)
    void pn_comm_drop(pn_comm_t *comm)
    void pn_comm_hold(pn_comm_t *comm)
    void pn_comm_release(pn_comm_t *comm)
    void pn_control_submit(pn_op_t *op)
    void pn_abort(pn_comm_t *const *comms, int count, pn_op_t *op, int64_t bound_ns)
    bint pn_submit(pn_op_t *op)
    bint pn_submit_group(pn_op_t **ops, int count)
    bint pn_op_finished(pn_op_t *op)
    bint pn_op_poll(pn_op_t *op)
    bint pn_op_spin(pn_op_t *op, int64_t budget_ns)
    bint pn_op_block(pn_op_t *op, int64_t until_ns)
    bint pn_op_wait(pn_op_t *op, pn_wait_t *wait)
    CUresult pn_hand_off(pn_op_t *op, CUstream producer)
    CUresult pn_order_streams(pn_device_t *device, CUstream first, CUstream later)
    CUresult pn_told_stream(pn_comm_t *comm, CUstream *stream)
    CUresult pn_aside(pn_comm_t *comm, CUstream *stream)
    CUresult pn_op_order(pn_op_t *op, CUstream stream)
    void pn_op_recycle(pn_op_t *op)
    CUresult pn_watch_stream(pn_op_t *op, pn_device_t *device, CUstream stream)
    CUresult pn_watch_event(pn_op_t *op, pn_device_t *device, CUevent event)
    ctypedef enum pn_burst_t:
        PN_BURST_GOES_ON
        PN_BURST_ENDS_TURN
    pn_burst_t pn_burst_await(int64_t now)
    void pn_burst_turn()
    void pn_burst_reset()
    void pn_suspended(int change)
    bint pn_may_spin()
    pn_op_t *pn_done_take()
    pn_op_t *pn_parting_take()
    bint pn_done_some()
    pn_mailbox_t *pn_mailbox_new()
    pn_wait_t *pn_mailbox_take(pn_mailbox_t *box)
    void pn_mailbox_free(pn_mailbox_t *box)
    bint pn_reaper_wait()
    void pn_reaper_stop()
    int64_t pn_now_ns()
    long pn_depth_repairs
    bint pn_launch_blocking
    bint pn_forked
    int64_t PN_NO_DEADLINE

    ctypedef struct pn_live_t:
        long operations, communicators, streams, events, gates, lanes, helpers, mailboxes
        long memory, registrations, operators
        long abandoned_communicators, stuck_threads
    void pn_live_read(pn_live_t *live)
    void pn_live_watch_fork()

cdef extern from "bind/inside.h" nogil:
    CUresult pn_stream_destroy(pn_device_t *device, CUstream stream)
    CUresult pn_stream_query(pn_device_t *device, CUstream stream)
    CUresult pn_stream_wait(pn_device_t *device, CUstream stream, CUevent event)
    CUresult pn_event_create(pn_device_t *device, CUevent *event, unsigned int flags)
    CUresult pn_event_destroy(pn_device_t *device, CUevent event)
    CUresult pn_event_record(pn_device_t *device, CUevent event, CUstream stream)
    CUresult pn_event_query(pn_device_t *device, CUevent event)
    CUresult pn_event_elapsed(
        pn_device_t *device, float *milliseconds, CUevent since, CUevent until
    )

cdef extern from "bind/memory.h" nogil:
    ctypedef struct pn_one_sided_t:
        ncclWindow_t window
        size_t offset
        int signal
        int context
        int awaited
        ncclWaitSignalDesc_t descriptors[0]
    int PN_DLPACK_MAJOR, PN_DLPACK_MINOR
    ctypedef enum pn_memory_kind_t:
        PN_MEMORY_NCCL, PN_MEMORY_DRIVER, PN_MEMORY_HOST
    ctypedef struct pn_memory_t:
        pn_device_t *device
        void *base
        size_t bytes
        pn_memory_kind_t kind
    pn_memory_t *pn_memory_new(
        pn_device_t *device, size_t bytes, pn_memory_kind_t kind, pn_outcome_t *why
    )
    pn_memory_t *pn_memory_of_tensor(pn_device_t *device, DLManagedTensorVersioned *tensor)
    pn_memory_t *pn_memory_hold(pn_memory_t *memory)
    void pn_memory_drop(pn_memory_t *memory)
    void pn_memory_stop()
    bint pn_memory_find(
        const pn_device_t *device, const void *address, void **base, size_t *bytes
    )
    DLManagedTensorVersioned *pn_memory_view(
        pn_memory_t *memory, const DLTensor *like, uint64_t flags
    )
    DLManagedTensor *pn_memory_view_unversioned(pn_memory_t *memory, const DLTensor *like)
    void pn_memory_serve(pn_engine_t *engine, bint on_gpu)
    void pn_memory_set_allocator(DLPackExchangeAPI *table)
    int pn_memory_pending(pn_memory_t *memory, pn_op_t **found, int room)
    ctypedef struct pn_registration_t:
        pn_link_t in_comm
        pn_op_t *lease
        void *base
        size_t bytes
        int flags
        bint is_window
        void *handle
        ncclWindow_t window
    ctypedef struct pn_operator_t:
        int32_t code
    pn_operator_t *pn_operator_new(
        pn_comm_t *comm, int32_t type, const void *scalar, bint on_device
    )
    void pn_operator_end(pn_operator_t *op)

cdef extern from "bind/uneven.h" nogil:
    ctypedef struct pn_part_t:
        size_t count
        size_t offset
    ctypedef struct pn_uneven_t:
        pn_part_t *send
        pn_part_t *recv
        bint asks
        int64_t *own
        int64_t *told
        const char *refusal
        pn_op_t *op
        pn_uneven_t *next
    pn_uneven_t *pn_asking_take()
    void pn_asking_answer(pn_uneven_t *uneven, bint fits)
