/* The kernels for every processor of the architecture that this is built for; on aarch64 that includes NEON.
 */
#define HOST_TABLE host_arithmetic_portable
#include "reduce_kernels.h"
