// A pretended CUDA device for a CPU build of torch: autograd, autocast and FakeTensor then accept `cuda` tensors. The
// device computes nothing, so every tensor on it must be a fake one. Load this before torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device only(DeviceType::CUDA, 0);

// The guard of torch's devices without kernels has no device index, and CUDA tensors have one.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return only; }
  Device getDevice() const override { return only; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);

} // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks);
} // namespace at
