// y (b, m) = x (b, k) @ w (m, k)^T where two of each four numbers of w along k are zero: cuSPARSELt
// as a custom call of XLA. The weight is packed in each call, because a training step changes it.

// Before the rest, which would include the whole of cuSPARSE and what that needs.
#include <cusparseLt_cusparse_stub.h>

#include <cusparseLt.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Destructors are left out: a plan lives as long as the process.
struct Product {
  cusparseLtMatDescriptor_t w, x, y;
  cusparseLtMatmulDescriptor_t matmul;
  cusparseLtMatmulAlgSelection_t algorithm;
  cusparseLtMatmulPlan_t plan;
  size_t packed = 0, packing = 0, workspace = 0;
};

struct Device {
  cusparseLtHandle_t handle;
  std::map<std::tuple<int64_t, int64_t, int64_t, int>, std::unique_ptr<Product>> products;
};

std::mutex guard;
std::map<int32_t, std::unique_ptr<Device>> devices;

ffi::Error Failed(const char* call, cusparseStatus_t status) {
  return ffi::Error::Internal(std::string("cuSPARSELt: ") + call + ": " +
                              cusparseLtGetErrorString(status));
}

#define TRY(call)                                                               \
  if (cusparseStatus_t status = (call); status != CUSPARSE_STATUS_SUCCESS) {    \
    return Failed(#call, status);                                               \
  }

ffi::Error Planned(Device& device, int64_t b, int64_t m, int64_t k, cudaDataType type,
                   Product*& found) {
  constexpr uint32_t kAligned = 16;
  auto& place = device.products[{b, m, k, type}];
  if (place == nullptr) {
    auto fresh = std::make_unique<Product>();
    const cusparseLtHandle_t* handle = &device.handle;
    TRY(cusparseLtStructuredDescriptorInit(handle, &fresh->w, m, k, k, kAligned, type,
                                           CUSPARSE_ORDER_ROW, CUSPARSELT_SPARSITY_50_PERCENT));
    TRY(cusparseLtDenseDescriptorInit(handle, &fresh->x, b, k, k, kAligned, type,
                                      CUSPARSE_ORDER_ROW));
    // (m, b) in columns is (b, m) in rows
    TRY(cusparseLtDenseDescriptorInit(handle, &fresh->y, m, b, m, kAligned, type,
                                      CUSPARSE_ORDER_COL));
    TRY(cusparseLtMatmulDescriptorInit(handle, &fresh->matmul, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                       CUSPARSE_OPERATION_TRANSPOSE, &fresh->w, &fresh->x,
                                       &fresh->y, &fresh->y, CUSPARSE_COMPUTE_32F));
    TRY(cusparseLtMatmulAlgSelectionInit(handle, &fresh->algorithm, &fresh->matmul,
                                         CUSPARSELT_MATMUL_ALG_DEFAULT));
    TRY(cusparseLtMatmulPlanInit(handle, &fresh->plan, &fresh->matmul, &fresh->algorithm));
    TRY(cusparseLtSpMMACompressedSize(handle, &fresh->plan, &fresh->packed, &fresh->packing));
    TRY(cusparseLtMatmulGetWorkspace(handle, &fresh->plan, &fresh->workspace));
    place = std::move(fresh);
  }
  found = place.get();
  return ffi::Error::Success();
}

ffi::Error Multiply(cudaStream_t stream, int32_t ordinal, ffi::ScratchAllocator scratch,
                    ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t b = x.dimensions()[0], k = x.dimensions()[1], m = w.dimensions()[0];
  cudaDataType type;
  switch (w.element_type()) {
    case ffi::DataType::BF16: type = CUDA_R_16BF; break;
    case ffi::DataType::F16: type = CUDA_R_16F; break;
    default: return ffi::Error::InvalidArgument("cuSPARSELt: 2:4 products are of 16-bit floats");
  }
  std::lock_guard<std::mutex> lock(guard);
  auto& device = devices[ordinal];
  if (device == nullptr) {
    auto fresh = std::make_unique<Device>();
    TRY(cusparseLtInit(&fresh->handle));
    device = std::move(fresh);
  }
  Product* product = nullptr;
  if (ffi::Error error = Planned(*device, b, m, k, type, product); error.failure()) return error;

  auto packed = scratch.Allocate(product->packed, 256);
  auto packing = scratch.Allocate(product->packing, 256);
  auto workspace = scratch.Allocate(product->workspace, 256);
  if (!packed || !packing || !workspace) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cuSPARSELt: no memory to pack a weight");
  }
  const float one = 1, zero = 0;
  TRY(cusparseLtSpMMACompress(&device->handle, &product->plan, w.untyped_data(), *packed, *packing,
                              stream));
  TRY(cusparseLtMatmul(&device->handle, &product->plan, &one, *packed, x.untyped_data(), &zero,
                       y->untyped_data(), y->untyped_data(), *workspace, &stream, 1));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxonnxSparseProduct, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
