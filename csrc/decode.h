// Few queries over many keys: the other way through a forward pass.
#pragma once

#include "finish.h"

namespace multihead {
namespace MH_BUILD {

constexpr double kSerialWork = 1.0e6;  // multiply-adds under which waking a thread costs more than it gives

// Whether `decode` serves a problem: by the number of query rows that share a key, and nothing else.
bool decodes(const Forward<Real>& problem);
bool decode(const Forward<Real>& problem);

}  // namespace MH_BUILD
}  // namespace multihead
