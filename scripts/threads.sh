# Sourced by the scripts that compute: how threads wait and memory is kept, unless the caller has said so. All of it must
# be in the environment before torch is imported.

# Threads that spin for long while they wait cost up to 47x on a busy machine. Those that sleep at once cost a wake-up an
# operation (benchmarks/waiting.py measures both). So they spin for some microseconds (GNU's OpenMP; others ignore the name
# and sleep).
if [ -z "${OMP_WAIT_POLICY:-}" ]; then
    export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"
fi

# glibc gives large tensors back to the kernel and faults them in again at every step; keeping up to a GiB makes a train
# step on two cores about 5 % faster. Other C libraries ignore the names.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
