// The activation of a gate and an up, by KIND (spec/activation.py's order); NaN stays NaN.
__device__ inline float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float relu2(float x) { return x < 0 ? 0.0f : x * x; }
__device__ inline float activated(float gate, float up) {
  if (KIND >= 3) up = -at_most(-at_most(up, LIMIT), LIMIT);
  if (KIND == 0) return gate / (1.0f + expf(-gate)) * up;
  if (KIND == 1) return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
  if (KIND == 2) return gate * sigmoid(1.59576912f * gate * (1.0f + 0.044715f * gate * gate)) * up;
  if (KIND == 5) return at_most(gate * sigmoid(gate), LIMIT) * up;
  gate = at_most(gate, LIMIT);
  return KIND == 4 ? gate * sigmoid(ALPHA * gate) * (up + 1.0f) : gate * sigmoid(gate) * up;
}
