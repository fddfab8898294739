/* Counts NumPy's data buffers to the byte, and caps them: an allocator handler (NEP 49).

   A Counter is a handler for the current context; arrays made under it hold its capsule, and the
   capsule holds the figures, so these outlive the Counter until the last such array is freed,
   by whatever thread. Memory itself comes from NumPy's own allocator, which is asked for at most
   80 bytes more: huge pages, small-block caches and untouched zero pages stay what they were.

   No NumPy headers: the structs and the table slots below are fixed parts of its binary interface
   since 1.22, checked when the module is loaded. One binary serves NumPy 1 and 2, and a build
   needs nothing but a C11 compiler. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* PyDataMemAllocator and PyDataMem_Handler of numpy/ndarraytypes.h, version 1. */
typedef struct {
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *, size_t);
} Allocator;

typedef struct {
    char name[127];
    uint8_t version;
    Allocator allocator;
} Handler;

/* Slots of the table of numpy/__multiarray_api.h. */
enum { SLOT_FEATURES = 211, SLOT_SET = 304, SLOT_GET = 305, SLOT_DEFAULT = 306 };
enum { FEATURES_WITH_HANDLERS = 0x0f }; /* NumPy 1.22 */
static const char CAPSULE[] = "mem_handler";

static PyObject *(*set_handler)(PyObject *);
static PyObject *(*get_handler)(void);
static Allocator numpy_own;

/* What a Counter counts. The handler is first: its address is the capsule's pointer. */
typedef struct {
    Handler handler;
    _Atomic int64_t live, peak, allocations, frees, refused, cap;
} Counts;

/* Lies just below the data: realloc is not told the old size, nor where the block begins. */
typedef struct {
    void *block;
    size_t size;
} Header;

enum { ALIGN = 64 };
/* NumPy's blocks are aligned to 8 or more, so this holds the header and the gap to ALIGN. */
static const size_t EXTRA = sizeof(Header) + ALIGN;

static Header *
header_of(void *data)
{
    return (Header *)data - 1;
}

/* With the interpreter lock, which NumPy holds whenever it calls a handler, a load and a store
   are enough, and a locked instruction would double the cost. */
static int64_t
add(_Atomic int64_t *figure, int64_t n)
{
#ifdef Py_GIL_DISABLED
    return atomic_fetch_add_explicit(figure, n, memory_order_relaxed) + n;
#else
    int64_t now = atomic_load_explicit(figure, memory_order_relaxed) + n;
    atomic_store_explicit(figure, now, memory_order_relaxed);
    return now;
#endif
}

/* Add n live bytes and return how many there are now; -1 if they would pass the cap. */
static int64_t
charge(Counts *counts, int64_t n)
{
    int64_t cap = atomic_load_explicit(&counts->cap, memory_order_relaxed);
    int64_t live = atomic_load_explicit(&counts->live, memory_order_relaxed);
#ifdef Py_GIL_DISABLED
    /* Test and add in one: no other thread may see a request that is refused. */
    do {
#endif
        if (cap && n > 0 && n > cap - live) {
            add(&counts->refused, 1);
            return -1;
        }
#ifdef Py_GIL_DISABLED
    } while (!atomic_compare_exchange_weak(&counts->live, &live, live + n));
#else
    atomic_store_explicit(&counts->live, live + n, memory_order_relaxed);
#endif
    return live + n;
}

static void
raise_peak(Counts *counts, int64_t live)
{
    int64_t peak = atomic_load_explicit(&counts->peak, memory_order_relaxed);
    while (live > peak && !atomic_compare_exchange_weak(&counts->peak, &peak, live)) {
    }
}

static void *
data_in(void *block)
{
    uintptr_t first = (uintptr_t)block + sizeof(Header);
    return (void *)((first + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));
}

static void *
with_header(void *block, size_t size)
{
    void *data = data_in(block);
    header_of(data)->block = block;
    header_of(data)->size = size;
    return data;
}

static void *
allocate(Counts *counts, size_t size, int zeroed)
{
    void *block;
    int64_t live;
    if (size > (size_t)PTRDIFF_MAX - EXTRA) {
        return NULL;
    }
    live = charge(counts, (int64_t)size);
    if (live < 0) {
        return NULL;
    }
    if (zeroed) {
        block = numpy_own.calloc(numpy_own.ctx, size + EXTRA, 1);
    }
    else {
        block = numpy_own.malloc(numpy_own.ctx, size + EXTRA);
    }
    if (block == NULL) {
        add(&counts->live, -(int64_t)size);
        return NULL;
    }
    raise_peak(counts, live);
    add(&counts->allocations, 1);
    return with_header(block, size);
}

static void *
counted_malloc(void *ctx, size_t size)
{
    return allocate(ctx, size, 0);
}

static void *
counted_calloc(void *ctx, size_t nelem, size_t elsize)
{
    if (elsize && nelem > (size_t)PTRDIFF_MAX / elsize) {
        return NULL;
    }
    return allocate(ctx, nelem * elsize, 1);
}

static void
counted_free(void *ctx, void *data, size_t Py_UNUSED(size))
{
    Counts *counts = ctx;
    Header header;
    if (data == NULL) {
        return;
    }
    header = *header_of(data);
    add(&counts->live, -(int64_t)header.size);
    add(&counts->frees, 1);
    numpy_own.free(numpy_own.ctx, header.block, header.size + EXTRA);
}

static void *
counted_realloc(void *ctx, void *data, size_t size)
{
    Counts *counts = ctx;
    Header old;
    int64_t live, more;
    size_t offset;
    char *block, *moved;
    if (data == NULL) {
        return allocate(counts, size, 0);
    }
    if (size > (size_t)PTRDIFF_MAX - EXTRA) {
        return NULL;
    }
    old = *header_of(data);
    offset = (size_t)((char *)data - (char *)old.block);
    more = (int64_t)size - (int64_t)old.size;
    live = charge(counts, more);
    if (live < 0) {
        return NULL;
    }
    block = numpy_own.realloc(numpy_own.ctx, old.block, size + EXTRA);
    if (block == NULL) {
        add(&counts->live, -more);
        return NULL;
    }
    raise_peak(counts, live);
    /* The block may have moved to where another gap leads to ALIGN. The header is written after
       the data is in place: it may lie where the data was. */
    moved = data_in(block);
    if (moved != block + offset) {
        memmove(moved, block + offset, old.size < size ? old.size : size);
    }
    return with_header(block, size);
}

static void
free_counts(PyObject *capsule)
{
    PyMem_RawFree(PyCapsule_GetPointer(capsule, CAPSULE));
}

typedef struct {
    PyObject_HEAD
    PyObject *capsule;
    Counts *counts; /* lives in the capsule */
} Counter;

static PyObject *
counter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Counter *self;
    Counts *counts;
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Counter() takes no arguments");
        return NULL;
    }
    self = (Counter *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    counts = PyMem_RawCalloc(1, sizeof(Counts));
    if (counts == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    strcpy(counts->handler.name, "mpisim_counter");
    counts->handler.version = 1;
    counts->handler.allocator = (Allocator){
        counts, counted_malloc, counted_calloc, counted_realloc, counted_free,
    };
    self->counts = counts;
    self->capsule = PyCapsule_New(counts, CAPSULE, free_counts);
    if (self->capsule == NULL) {
        PyMem_RawFree(counts);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
counter_dealloc(Counter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->capsule);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
counter_install(Counter *self, PyObject *Py_UNUSED(ignored))
{
    return set_handler(self->capsule);
}

static PyObject *
counter_installed(Counter *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *current = get_handler();
    if (current == NULL) {
        return NULL;
    }
    Py_DECREF(current);
    return PyBool_FromLong(current == self->capsule);
}

static PyObject *
counter_reset_peak(Counter *self, PyObject *Py_UNUSED(ignored))
{
    atomic_store(&self->counts->peak, atomic_load(&self->counts->live));
    Py_RETURN_NONE;
}

static PyObject *
counter_figure(Counter *self, void *offset)
{
    _Atomic int64_t *figure = (_Atomic int64_t *)((char *)self->counts + (size_t)offset);
    return PyLong_FromLongLong(atomic_load_explicit(figure, memory_order_relaxed));
}

static PyObject *
counter_get_cap(Counter *self, void *Py_UNUSED(closure))
{
    int64_t cap = atomic_load(&self->counts->cap);
    if (cap == 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(cap);
}

static int
counter_set_cap(Counter *self, PyObject *value, void *Py_UNUSED(closure))
{
    long long cap = 0;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "cap must stay; set it to None for no cap");
        return -1;
    }
    if (value != Py_None) {
        cap = PyLong_AsLongLong(value);
        if (cap == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (cap < 0) {
            PyErr_Format(PyExc_ValueError,
                         "cap must be a number of bytes, not negative; got %lld. "
                         "Set None for no cap.", cap);
            return -1;
        }
    }
    atomic_store(&self->counts->cap, (int64_t)cap);
    return 0;
}

#define FIGURE(field, doc) \
    {#field, (getter)counter_figure, NULL, doc, (void *)offsetof(Counts, field)}

static PyGetSetDef counter_getset[] = {
    FIGURE(live, "Bytes allocated and not yet freed."),
    FIGURE(peak, "Most live bytes since the last reset_peak()."),
    FIGURE(allocations, "Buffers allocated; growing one is not another one."),
    FIGURE(frees, "Buffers freed."),
    FIGURE(refused, "Requests turned down because they would have passed the cap."),
    {"cap", (getter)counter_get_cap, (setter)counter_set_cap,
     "Most live bytes allowed; None or 0 means any number.", NULL},
    {NULL},
};

static PyMethodDef counter_methods[] = {
    {"install", (PyCFunction)counter_install, METH_NOARGS,
     "Make this NumPy's allocator in the current context; return the one before, for restore()."},
    {"installed", (PyCFunction)counter_installed, METH_NOARGS,
     "Tell whether this is NumPy's allocator in the current context."},
    {"reset_peak", (PyCFunction)counter_reset_peak, METH_NOARGS, "Set peak to live."},
    {NULL},
};

static PyType_Slot counter_slots[] = {
    {Py_tp_doc, "Counts the data buffers of NumPy arrays made while it is installed."},
    {Py_tp_new, counter_new},
    {Py_tp_dealloc, counter_dealloc},
    {Py_tp_getset, counter_getset},
    {Py_tp_methods, counter_methods},
    {0, NULL},
};

static PyType_Spec counter_spec = {
    .name = "mpisim.memory._allocator.Counter",
    .basicsize = sizeof(Counter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = counter_slots,
};

static PyObject *
restore(PyObject *Py_UNUSED(module), PyObject *previous)
{
    PyObject *replaced;
    if (!PyCapsule_IsValid(previous, CAPSULE)) {
        PyErr_Format(PyExc_TypeError, "restore() must get what install() returned; got %R.",
                     previous);
        return NULL;
    }
    replaced = set_handler(previous);
    if (replaced == NULL) {
        return NULL;
    }
    Py_DECREF(replaced);
    Py_RETURN_NONE;
}

/* The table of NumPy's functions; the module that holds it was renamed in NumPy 2. */
static void **
numpy_table(void)
{
    void **table;
    PyObject *capsule;
    PyObject *numpy = PyImport_ImportModule("numpy._core._multiarray_umath");
    if (numpy == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_Clear();
        numpy = PyImport_ImportModule("numpy.core._multiarray_umath");
    }
    if (numpy == NULL) {
        return NULL;
    }
    capsule = PyObject_GetAttrString(numpy, "_ARRAY_API");
    Py_DECREF(numpy);
    if (capsule == NULL) {
        return NULL;
    }
    table = PyCapsule_GetPointer(capsule, NULL);
    Py_DECREF(capsule); /* NumPy's module keeps it */
    return table;
}

static int
module_exec(PyObject *module)
{
    PyObject *type;
    Handler *own;
    unsigned int version, features;
    void **table = numpy_table();
    if (table == NULL) {
        return -1;
    }
    version = ((unsigned int (*)(void))table[0])();
    features = ((unsigned int (*)(void))table[SLOT_FEATURES])();
    if ((version >> 24 != 1 && version >> 24 != 2) || features < FEATURES_WITH_HANDLERS) {
        PyErr_Format(PyExc_ImportError,
                     "NumPy must have the binary interface of 1.22 to 2; got version 0x%x, "
                     "features 0x%x.", version, features);
        return -1;
    }
    own = PyCapsule_GetPointer(*(PyObject **)table[SLOT_DEFAULT], CAPSULE);
    if (own == NULL) {
        return -1;
    }
    if (own->version != 1) {
        PyErr_Format(PyExc_ImportError, "NumPy's memory handler must have version 1; got %d.",
                     own->version);
        return -1;
    }
    set_handler = (PyObject * (*)(PyObject *)) table[SLOT_SET];
    get_handler = (PyObject * (*)(void)) table[SLOT_GET];
    numpy_own = own->allocator;
    type = PyType_FromModuleAndSpec(module, &counter_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "Counter", type) < 0) {
        Py_DECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return 0;
}

static PyMethodDef module_methods[] = {
    {"restore", restore, METH_O,
     "Make what Counter.install() returned NumPy's allocator again, in the current context."},
    {NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_allocator",
    .m_doc = "Counts and caps the data buffers of NumPy arrays (compiled; optional).",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__allocator(void)
{
    return PyModuleDef_Init(&module);
}
