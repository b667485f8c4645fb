// Errors: a code for the caller, and a text that names the call and the addresses.
#include "standin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace standin {
namespace {

struct Text {
    int code = 0;  // 0: none
    char text[2048];
};

// One text a code: a library may report an error after later calls failed with other codes.
constexpr size_t kTexts = 16;
thread_local Text texts[kTexts];
thread_local size_t oldest = 0;

Text* text_of(int code) {
    for (Text& known : texts)
        if (known.code == code) return &known;
    return nullptr;
}

}  // namespace

void log_line(const char* format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "standin_gpu[%d]: %s\n", getpid(), text);
}

int fault(int code, const char* format, ...) {
    va_list arguments;
    Text* known = text_of(code);
    if (!known) known = &texts[oldest++ % kTexts];
    known->code = code;
    va_start(arguments, format);
    vsnprintf(known->text, sizeof known->text, format, arguments);
    va_end(arguments);
    return code;
}

const char* fault_text(int code) {
    const Text* known = text_of(code);
    return known ? known->text : "";
}

int unknown_function(const char* name) {
    static std::mutex mutex;
    static auto* seen = new std::set<std::string>;
    {
        std::lock_guard<std::mutex> lock(mutex);
        // A caller may swallow the code: the log names the function all the same, once.
        if (seen->insert(name).second) log_line("%s is not imitated", name);
    }
    return fault(kNotSupported, "%s is not imitated", name);
}

bool is_strict() {
    static const bool value = getenv("STANDIN_GPU_STRICT") != nullptr;
    return value;
}

namespace {

// Functions of Python's stable interface, looked up: a program without Python has none.
struct Python {
    int (*is_initialized)() = nullptr;
    void* (*own_thread)() = nullptr;
    int (*acquire)() = nullptr;
    void (*release)(int) = nullptr;
    void* (*frame)() = nullptr;
    void* (*frame_back)(void*) = nullptr;
    void* (*frame_code)(void*) = nullptr;
    int (*frame_line)(void*) = nullptr;
    void* (*attribute)(void*, const char*) = nullptr;
    const char* (*text)(void*) = nullptr;
    void (*take)(void*) = nullptr;
    void (*give)(void*) = nullptr;
    bool is_whole = false;

    Python() {
        is_whole = find(&is_initialized, "Py_IsInitialized") && find(&own_thread, "PyGILState_GetThisThreadState") &&
                   find(&acquire, "PyGILState_Ensure") && find(&release, "PyGILState_Release") &&
                   find(&frame, "PyEval_GetFrame") && find(&frame_back, "PyFrame_GetBack") &&
                   find(&frame_code, "PyFrame_GetCode") && find(&frame_line, "PyFrame_GetLineNumber") &&
                   find(&attribute, "PyObject_GetAttrString") && find(&text, "PyUnicode_AsUTF8") &&
                   find(&take, "Py_IncRef") && find(&give, "Py_DecRef");
    }

    template <typename Function>
    static bool find(Function* function, const char* name) {
        *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
        return *function != nullptr;
    }

    std::string file_of(void* frame) const {
        void* code = frame_code(frame);
        void* name = attribute(code, "co_filename");
        const char* found = name ? text(name) : nullptr;
        std::string result = found ? found : "";
        if (name) give(name);
        give(code);
        return result;
    }
};

}  // namespace

static const Python& python_functions() {
    static const Python python;
    return python;
}

bool is_python_thread() {
    const Python& python = python_functions();
    return python.is_whole && python.is_initialized() && python.own_thread();
}

std::string python_caller() {
    if (!is_python_thread()) return "";
    const Python& python = python_functions();
    const int state = python.acquire();
    void* frame = python.frame();
    if (frame) python.take(frame);
    std::string result;
    while (frame) {
        const std::string file = python.file_of(frame);
        // The innermost frame outside installed packages; without one, the innermost at all.
        const bool is_library = file.find("/site-packages/") != std::string::npos || file.rfind("<frozen", 0) == 0;
        if (result.empty() || !is_library) result = file + ":" + std::to_string(python.frame_line(frame));
        void* outer = is_library ? python.frame_back(frame) : nullptr;
        python.give(frame);
        frame = outer;
    }
    python.release(state);
    return result;
}

}  // namespace standin
