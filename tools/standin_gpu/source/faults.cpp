// Errors: a code for the caller, and a text that names the call and the addresses.
#include "standin.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <set>

namespace standin {
namespace {
thread_local int last_code = 0;
thread_local char last_text[512];
}  // namespace

void log_line(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "standin_gpu[%d]: %s\n", getpid(), text);
}

int fault(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_text, sizeof last_text, format, arguments);
    va_end(arguments);
    last_code = code;
    return code;
}

const char* fault_text(int code) { return code == last_code ? last_text : ""; }

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

}  // namespace standin
