// A second torch device, of two units, without hardware: memory of its own, every operation by the CPU's kernel, and no
// operation that mixes its tensors with the CPU's or one unit's with the other's. What runs here without an error has put
// every tensor where it belongs. It counts what makes a GPU wait: numbers read off the device, and copies.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <set>
#include <string>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int UNITS = 2;

struct Unit {
  std::atomic<int64_t> now{0}, peak{0}, allocations{0}, limit{std::numeric_limits<int64_t>::max()};
};
Unit units[UNITS];
std::atomic<int64_t> reads{0}, writes{0};  // off the device and onto it, as a program pays for them
std::atomic<bool> has_double{true};        // some devices have no float64
thread_local int current = 0;
thread_local bool is_inside = false;  // of the fallback, which copies to the CPU and back: no program pays for that

struct Block {
  void* memory;
  int64_t size;
  int unit;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  units[block->unit].now -= block->size;
  c10::free_cpu(block->memory);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return allocate_on(size, current); }
  c10::DataPtr allocate_on(size_t size, int unit) {
    auto& here = units[unit];
    const int64_t after = here.now + static_cast<int64_t>(size);
    TORCH_CHECK_WITH(OutOfMemoryError, after <= here.limit, "sim out of memory. Tried to allocate ", size,
                     " bytes. Device ", unit, " has ", here.limit - here.now, " bytes free.");
    here.now = after;
    here.peak = std::max<int64_t>(here.peak, after);
    ++here.allocations;
    auto* block = new Block{c10::alloc_cpu(size), static_cast<int64_t>(size), unit};
    return {block->memory, block, &release, c10::Device(SIM, unit)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(SIM, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const int before = current;
    current = d.index();
    return {SIM, static_cast<c10::DeviceIndex>(before)};
  }
  c10::Device getDevice() const override { return {SIM, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return UNITS; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return UNITS; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const int before = current;
    current = d;
    return static_cast<c10::DeviceIndex>(before);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = memory.allocate_on(size, storage.device().index());
    std::memcpy(made.mutable_get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr(std::move(made));
    storage.set_nbytes(size);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == SIM; }

at::Tensor on_cpu(const at::Tensor& t) {  // the same memory, as the CPU sees it
  if (!is_sim(t)) return t;
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU).requires_grad(false));
}

struct On {  // makes a unit the current one
  explicit On(std::optional<at::Device> d) : before(current) {
    if (d && d->has_index()) current = d->index();
  }
  ~On() { current = before; }
  int before;
};

void refuse_double(std::optional<at::ScalarType> type) {
  TORCH_CHECK_TYPE(has_double || c10::dtype_or_default(type) != at::kDouble, "sim has no float64");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  refuse_double(type);
  const On unit(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  refuse_double(type);
  const On unit(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!is_inside && from.device() != to.device()) {
    reads += is_sim(from);
    writes += is_sim(to);
  }
  on_cpu(to).copy_(on_cpu(from).expand(to.sizes()));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = c10::multiply_integers(sizes) * self.dtype().itemsize();
  if (self.storage().nbytes() < bytes) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Scalar item(const at::Tensor& self) {
  reads += !is_inside;
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                              offset.guard_int(__FILE__, __LINE__));
  return self;
}

// these make the host wait with CUDA, for the size of the result depends on the values
const std::set<std::string> SIZED = {"aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::unique_dim",
                                     "aten::repeat_interleave", "aten::equal", "aten::is_nonzero"};
// indices may lie on the CPU, as with CUDA; a number (no dimension) may, too
const std::set<std::string> MIXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};

void refuse_mixed(const c10::OperatorHandle& op, const at::Tensor& t, std::optional<at::Device>& unit) {
  if (!t.defined() || t.dim() == 0) return;
  if (is_sim(t) && (!unit || t.device() == *unit)) {
    unit = t.device();
    return;
  }
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              unit ? unit->str() : "sim", " and ", t.device(), " (", op.operator_name(), ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  const auto count = op.schema().arguments().size();
  std::optional<at::Device> unit;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const auto& value = (*stack)[i];
    const bool may_mix = MIXED.count(name) > 0;
    if (value.isTensor() && !may_mix) refuse_mixed(op, value.toTensor(), unit);
    if (value.isTensorList() && !may_mix)
      for (const at::Tensor& t : value.toTensorVector()) refuse_mixed(op, t, unit);
    if (value.isTensor() && is_sim(value.toTensor()) && !unit) unit = value.toTensor().device();
    if (may_mix && value.isList())  // a mask chooses how many
      for (const c10::IValue& v : value.toListRef())
        if (v.isTensor() && v.toTensor().defined()) {
          const auto& t = v.toTensor();
          const bool is_mask = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
          reads += !is_inside && is_sim(t) && is_mask;
          writes += !is_inside && !is_sim(t);
        }
  }
  reads += !is_inside && SIZED.count(name);
  const On here(unit);
  const bool was_inside = is_inside;
  is_inside = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    is_inside = was_inside;
    throw;
  }
  is_inside = was_inside;
}

at::Tensor moved(const at::Tensor& t, at::Device unit) {  // a result of the CPU's kernel, to where it belongs
  if (!t.defined()) return t;
  auto to = at::empty_strided(t.sizes(), t.strides(), t.options().device(unit));
  on_cpu(to).copy_(t);
  return to;
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef pad, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef out_pad, c10::SymInt groups) {
  TORCH_CHECK(x.device() == w.device(), "Expected all tensors to be on the same device (convolution)");
  auto out = at::convolution_symint(on_cpu(x), on_cpu(w), b ? std::optional(on_cpu(*b)) : b, stride, pad, dilation,
                                    transposed, out_pad, groups);
  return moved(out, x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef pad,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef out_pad, c10::SymInt groups,
    std::array<bool, 3> mask) {
  std::vector<c10::SymInt> bias{transposed ? w.sym_size(1) * groups : w.sym_size(0)};
  auto [a, b, c] = at::convolution_backward_symint(on_cpu(g), on_cpu(x), on_cpu(w), c10::SymIntArrayRef(bias), stride,
                                                   pad, dilation, transposed, out_pad, groups, mask);
  return {moved(a, x.device()), moved(b, x.device()), moved(c, x.device())};
}

// writes into the running statistics, which its schema does not say: the fallback would write into copies
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training, double momentum, double eps) {
  auto here = [&](const std::optional<at::Tensor>& t) -> std::optional<at::Tensor> {
    if (!t || !t->defined()) return t;
    TORCH_CHECK(t->device() == x.device(), "Expected all tensors to be on the same device (batch_norm)");
    return on_cpu(*t);
  };
  auto [a, b, c] = at::native_batch_norm(on_cpu(x), here(weight), here(bias), here(mean), here(var), training, momentum, eps);
  return {moved(a, x.device()), moved(b, x.device()), moved(c, x.device())};
}

// torch takes its fused cell on every device but the CPU: here as plain operations, which autograd knows
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden,
                                                         const at::Tensor& cell, const std::optional<at::Tensor>& b1,
                                                         const std::optional<at::Tensor>& b2) {
  auto gates = from_input + from_hidden;
  for (const auto& b : {b1, b2})
    if (b && b->defined()) gates = gates + *b;
  auto parts = gates.chunk(4, 1);
  auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("convolution_overrideable", convolution);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_thnn_fused_lstm_cell", lstm_cell); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // products in lower precision, as on a GPU
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}

extern "C" {
int64_t sim_reads() { return reads; }
int64_t sim_writes() { return writes; }
int64_t sim_peak(int unit) { return units[unit].peak; }
int64_t sim_now(int unit) { return units[unit].now; }
int64_t sim_allocations(int unit) { return units[unit].allocations; }
int64_t sim_limit(int unit) { return units[unit].limit; }
void sim_reset_peak(int unit) { units[unit].peak = units[unit].now.load(); }
void sim_set_limit(int unit, int64_t bytes) { units[unit].limit = bytes; }
void sim_set_double(int has) { has_double = has != 0; }
}
