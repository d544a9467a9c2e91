/* The weights and pages of a dense layer, for fused_layers.c. */

#ifndef ONEDRAW_FUSED_LAYERS_H
#define ONEDRAW_FUSED_LAYERS_H

#include "attention.h"
#include "packed_linear.h"

typedef struct {
    const packed_linear *qkv, *out, *gate_up, *down;
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;
    float *keys, *values;      /* the layer's KV pages */
    long hidden, mixed, width; /* columns: hidden: of the residual; mixed: of the attention output; width: of the gate */
    float eps;
    float *key_scales, *value_scales;
    long kv_dtype;  /* type of the pages, from the enum of kv_quant.h */
    long stream;    /* type of the residual stream, from the same enum: it is rounded to this type after each addition */
} layer;

#endif
