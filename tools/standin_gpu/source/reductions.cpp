#include "reductions.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "standin.h"

namespace standin {
namespace {

template <typename Element>
struct Plain {
    using Wide = Element;
    static Wide widen(Element value) { return value; }
    static Element narrow(Wide value) { return value; }
};

// Half types are summed in float32, and rounded once.
template <typename Element>
struct Half {
    using Wide = float;
    static Wide widen(Element value) { return static_cast<float>(value); }
    static Element narrow(Wide value) { return Element(value); }
};

template <typename Element, typename Rules>
ncclResult_t reduce_as(const std::vector<std::vector<char>>& all, size_t offset, size_t count, ncclRedOp_t operation,
                       void* target) {
    auto* results = static_cast<Element*>(target);
    for (size_t i = 0; i < count; i++) {
        const auto value_of = [&](size_t rank) {
            return Rules::widen(reinterpret_cast<const Element*>(all[rank].data() + offset)[i]);
        };
        auto total = value_of(0);
        for (size_t rank = 1; rank < all.size(); rank++) {
            const auto value = value_of(rank);
            if (operation == ncclMax) total = std::max(total, value);
            else if (operation == ncclMin) total = std::min(total, value);
            else if (operation == ncclProd) total *= value;
            else total += value;
        }
        if (operation == ncclAvg) total /= static_cast<typename Rules::Wide>(all.size());
        results[i] = Rules::narrow(total);
    }
    return ncclSuccess;
}

}  // namespace

size_t element_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        default:
            return 1;
    }
}

const char* type_name(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: return "int8";
        case ncclUint8: return "uint8";
        case ncclInt32: return "int32";
        case ncclUint32: return "uint32";
        case ncclInt64: return "int64";
        case ncclUint64: return "uint64";
        case ncclFloat16: return "float16";
        case ncclFloat32: return "float32";
        case ncclFloat64: return "float64";
        case ncclBfloat16: return "bfloat16";
        default: return "float8";
    }
}

ncclResult_t reduce(const std::vector<std::vector<char>>& all, size_t offset, size_t count, ncclDataType_t type,
                    ncclRedOp_t operation, void* target) {
    if (operation >= ncclNumOps) {
        log_line("a reduction made by ncclRedOpCreatePreMulSum is not imitated");
        return ncclInvalidUsage;
    }
    switch (type) {
        case ncclInt8: return reduce_as<int8_t, Plain<int8_t>>(all, offset, count, operation, target);
        case ncclUint8: return reduce_as<uint8_t, Plain<uint8_t>>(all, offset, count, operation, target);
        case ncclInt32: return reduce_as<int32_t, Plain<int32_t>>(all, offset, count, operation, target);
        case ncclUint32: return reduce_as<uint32_t, Plain<uint32_t>>(all, offset, count, operation, target);
        case ncclInt64: return reduce_as<int64_t, Plain<int64_t>>(all, offset, count, operation, target);
        case ncclUint64: return reduce_as<uint64_t, Plain<uint64_t>>(all, offset, count, operation, target);
        case ncclFloat32: return reduce_as<float, Plain<float>>(all, offset, count, operation, target);
        case ncclFloat64: return reduce_as<double, Plain<double>>(all, offset, count, operation, target);
        case ncclFloat16: return reduce_as<__half, Half<__half>>(all, offset, count, operation, target);
        case ncclBfloat16: return reduce_as<__nv_bfloat16, Half<__nv_bfloat16>>(all, offset, count, operation, target);
        default:
            log_line("a reduction of NCCL's type %d is not imitated", static_cast<int>(type));
            return ncclInvalidArgument;
    }
}

}  // namespace standin
