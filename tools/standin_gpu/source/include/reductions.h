// Reductions of NCCL's element types.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <vector>

namespace standin {

size_t element_bytes(ncclDataType_t type);
const char* type_name(ncclDataType_t type);

// Reduces `count` elements of each rank's bytes, from the offset in bytes on, in the order of the ranks.
ncclResult_t reduce(const std::vector<std::vector<char>>& all, size_t offset, size_t count, ncclDataType_t type,
                    ncclRedOp_t operation, void* target);

}  // namespace standin
