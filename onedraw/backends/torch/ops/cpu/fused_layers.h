/* A dense layer as fused_layers.c reads it. */

#ifndef ONEDRAW_FUSED_LAYERS_H
#define ONEDRAW_FUSED_LAYERS_H

#include "attention.h"
#include "packed_linear.h"

typedef struct {
    const packed_linear *qkv, *out, *gate_up, *down;
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;
    float *keys, *values;      /* its pages */
    long hidden, mixed, width; /* of the residual, of what is attended, of the gate */
    float eps;
    float *key_scales, *value_scales;
    long kv_dtype; /* what its pages hold, and their scales: attention.h */
} layer;

#endif
