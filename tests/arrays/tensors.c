/* Tensors by hand, as a C library gives them out: capsules of both kinds and an exchange table, every part of
 * them as a test wants it, and a count of what comes back.
 */
#include <Python.h>

#include "abi/dlpack_abi.h"

#include <string.h>

enum { MOST_AXES = 8 };

/* What a test asks for; numbers outside of DLPack's rules included. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t shape[MOST_AXES], strides[MOST_AXES];
    int32_t has_shape, has_strides;
    uint64_t byte_offset, flags;
    uint32_t major, minor;
    int32_t fault; /* of the table: 1 raises, 2 fails without a word, 3 gives nothing */
} wish_t;

/* given, taken back, taken back without the GIL, thread of the last */
long tensors_given, tensors_deleted, tensors_deleted_badly;
unsigned long tensors_thread;
void *tensors_stream; /* what the table tells as the current stream */
long tensors_stream_asked;

typedef struct {
    DLManagedTensorVersioned versioned;
    DLManagedTensor older;
    int64_t shape[MOST_AXES], strides[MOST_AXES];
    PyObject *owner;
} made_t;

static void give_back(made_t *made) {
    tensors_thread = PyThread_get_thread_ident();
    if (!PyGILState_Check())
        tensors_deleted_badly++;
    tensors_deleted++;
    Py_XDECREF(made->owner);
    PyMem_RawFree(made);
}
static void delete_versioned(DLManagedTensorVersioned *tensor) {
    give_back(tensor->manager_ctx);
}
static void delete_older(DLManagedTensor *tensor) {
    give_back(tensor->manager_ctx);
}

static void fill(DLTensor *tensor, const wish_t *wish, int64_t *shape, int64_t *strides) {
    memcpy(shape, wish->shape, sizeof wish->shape);
    memcpy(strides, wish->strides, sizeof wish->strides);
    *tensor = (DLTensor){
        .data = wish->data,
        .device = {wish->device_type, wish->device_id},
        .ndim = wish->ndim,
        .dtype = {wish->code, wish->bits, wish->lanes},
        .shape = wish->has_shape ? shape : NULL,
        .strides = wish->has_strides ? strides : NULL,
        .byte_offset = wish->byte_offset,
    };
}

static made_t *make(const wish_t *wish, PyObject *owner) {
    made_t *made = PyMem_RawCalloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    Py_INCREF(owner);
    made->owner = owner;
    fill(&made->versioned.dl_tensor, wish, made->shape, made->strides);
    made->older.dl_tensor = made->versioned.dl_tensor;
    made->versioned.version = (DLPackVersion){wish->major, wish->minor};
    made->versioned.flags = wish->flags;
    made->versioned.manager_ctx = made->older.manager_ctx = made;
    made->versioned.deleter = delete_versioned;
    made->older.deleter = delete_older;
    tensors_given++;
    return made;
}

/* A capsule gives its tensor back when it dies; nobody here ever consumes one. */
static void end_of_capsule(PyObject *capsule) {
    const char *name = PyCapsule_GetName(capsule);
    void *tensor = PyCapsule_GetPointer(capsule, name);
    if (strstr(name, "versioned"))
        delete_versioned(tensor);
    else
        delete_older(tensor);
}

PyObject *tensors_capsule(const wish_t *wish, PyObject *owner, const char *name) {
    /* A capsule keeps the address of its name. */
    static const char *const names[] = {"dltensor_versioned", "dltensor", "used_dltensor_versioned",
                                        "used_dltensor", "arrow_schema"};
    int which = 0;
    while (strcmp(name, names[which]) != 0)
        which++;
    made_t *made = make(wish, owner);
    if (made == NULL)
        return PyErr_NoMemory();
    void *tensor = strstr(name, "versioned") ? (void *)&made->versioned : (void *)&made->older;
    return PyCapsule_New(tensor, names[which], end_of_capsule);
}

/* ---- the table: `object.wish` is the address of a wish_t ---------------------------------------------- */

static const wish_t *wish_of(void *object) {
    PyObject *number = PyObject_GetAttrString(object, "wish");
    const wish_t *wish = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (wish != NULL && wish->fault == 1)
        PyErr_SetString(PyExc_BufferError, "not today\nand no second line");
    return wish == NULL || wish->fault == 1 || wish->fault == 2 ? NULL : wish;
}

static int give(void *object, DLManagedTensorVersioned **out) {
    const wish_t *wish = wish_of(object);
    made_t *made = wish && wish->fault == 0 ? make(wish, object) : NULL;
    *out = made ? &made->versioned : NULL;
    return wish ? 0 : -1;
}
static int lend(void *object, DLTensor *out) {
    static int64_t shape[MOST_AXES], strides[MOST_AXES];
    const wish_t *wish = wish_of(object);
    if (wish)
        fill(out, wish, shape, strides);
    return wish ? 0 : -1;
}
static int allocate(DLTensor *like, DLManagedTensorVersioned **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message)) {
    (void)like, (void)out;
    set_error(context, "MemoryError", "this library makes no tensors");
    return -1;
}
static int take(DLManagedTensorVersioned *tensor, void **out) {
    (void)tensor, (void)out;
    PyErr_SetString(PyExc_NotImplementedError, "this library takes no tensors");
    return -1;
}
static int current(DLDeviceType type, int32_t device, void **out) {
    (void)type, (void)device;
    tensors_stream_asked++;
    *out = tensors_stream;
    return 0;
}

DLPackExchangeAPI tensors_table = {
    .header = {{1, 3}, NULL},
    .managed_tensor_allocator = allocate,
    .managed_tensor_from_py_object_no_sync = give,
    .managed_tensor_to_py_object_no_sync = take,
    .dltensor_from_py_object_no_sync = lend,
    .current_work_stream = current,
};
/* A table of a version that is not known yet, with the older one behind it; and one that has no tensors. */
DLPackExchangeAPI tensors_later_table = {.header = {{2, 0}, &tensors_table.header}};
DLPackExchangeAPI tensors_alien_table = {.header = {{2, 0}, NULL}};
DLPackExchangeAPI tensors_empty_table = {.header = {{1, 3}, NULL}};

PyObject *tensors_table_capsule(void *table) {
    return PyCapsule_New(table, "dlpack_exchange_api", NULL);
}
