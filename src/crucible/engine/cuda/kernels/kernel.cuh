// What a kernel begins with.
#pragma once
#include "common.cuh"

#define KERNEL extern "C" __global__ void

extern __shared__ __align__(16) char shared_memory[];
