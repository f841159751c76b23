// NCCL's place: the collectives of gloo on the memory of the emulated devices, on a stream of the group as NCCL has one.
#include "nccl.hpp"

#include <ATen/ops/empty.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>

#include "operators.hpp"

namespace emulated {
namespace {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

// Done when it was issued; ordered as NCCL orders it: `wait` makes the current stream wait, not the host, and so does the future, which
// records an event of the collective's stream. Operands are kept until then, for the allocator.
struct Issued final : c10d::Work {
  Issued(int rank, OpType type, Tensors inputs, Tensors outputs, const c10::Stream& stream)
      : c10d::Work(rank, type), inputs_(std::move(inputs)), outputs_(std::move(outputs)), clock_(clock_of(index_of(stream))), device_(stream.device_index()) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    auto before = set_stream(stream);
    future_->markCompleted(c10::IValue(outputs_));
    set_stream(before);
    finish();
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    emulated::wait(index_of(current_stream(device_)), clock_);
    inputs_.clear();
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors inputs_, outputs_;
  Clock clock_;
  int device_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct Options final : c10d::Backend::Options {
  explicit Options(bool is_high) : c10d::Backend::Options("nccl", std::chrono::milliseconds(600000)), is_high_priority_stream(is_high) {}
  bool is_high_priority_stream;
};

// A test that waits for the watchdog sets EMULATED_CUDA_NCCL_SECONDS; the options of the group keep what the program set.
std::chrono::milliseconds limited(std::chrono::milliseconds timeout) {
  const char* seconds = std::getenv("EMULATED_CUDA_NCCL_SECONDS");
  return seconds == nullptr ? timeout : std::min(timeout, std::chrono::milliseconds(1000 * std::atoi(seconds)));
}

void check(const Tensors& tensors) {
  for (const auto& each : tensors) TORCH_CHECK(each.is_cuda(), "No backend type associated with device type ", each.device().type());
}
// What is moved and not computed with: gloo has no fp8, which NCCL moves.
at::Tensor moved(const at::Tensor& tensor) {
  auto host = on_cpu(tensor);
  return c10::isFloat8Type(host.scalar_type()) ? host.view(at::kByte) : host;
}
Tensors all_moved(const Tensors& tensors) {
  Tensors out;
  for (const auto& each : tensors) out.push_back(moved(each));
  return out;
}

// The flight recorder, as torch/csrc/distributed/c10d/FlightRecorder.hpp keeps the last TORCH_FR_BUFFER_SIZE collectives.
struct Recorded {
  uint64_t id, sequence;
  std::string name, group, description;
  bool is_p2p, retired;
};
class Recorder {
 public:
  uint64_t add(OpType type, uint64_t sequence, const std::string& group, const std::string& description) {
    std::lock_guard<std::mutex> guard(mutex_);
    bool is_p2p = type == OpType::SEND || type == OpType::RECV;
    entries_.push_back({next_, sequence, name_of(type), group, description, is_p2p, false});
    if (entries_.size() > most_) entries_.pop_front();
    return next_++;
  }
  void retire(uint64_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!entries_.empty() && id >= entries_.front().id) entries_[id - entries_.front().id].retired = true;
  }
  std::deque<Recorded> entries() {
    std::lock_guard<std::mutex> guard(mutex_);
    return entries_;
  }

 private:
  static std::string name_of(OpType type) {
    switch (type) {
      case OpType::ALLREDUCE: return "nccl:all_reduce";
      case OpType::ALLGATHER: return "nccl:all_gather";
      case OpType::_ALLGATHER_BASE: return "nccl:_all_gather_base";
      case OpType::BARRIER: return "nccl:all_reduce_barrier";
      default: break;
    }
    auto name = "nccl:" + c10d::opTypeToString(type);
    for (auto& letter : name) letter = static_cast<char>(std::tolower(letter));
    return name;
  }
  std::mutex mutex_;
  std::deque<Recorded> entries_;
  uint64_t next_ = 0;
  const size_t most_ = std::getenv("TORCH_FR_BUFFER_SIZE") == nullptr ? 2000 : std::strtoul(std::getenv("TORCH_FR_BUFFER_SIZE"), nullptr, 10);
};
Recorder recorder;

struct Nccl final : c10d::Backend {
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, c10::intrusive_ptr<Options> options)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), options_(std::move(options)) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    gloo_->setTimeout(limited(timeout));
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override {
    return issue(OpType::COALESCED, true, {}, {}, [] {});
  }
  void eagerConnectSingleDevice(at::Device) override {}

  // Of a device: asynchronous collectives run there, after the work of the current stream; the others run on that (since torch 2.8).
  c10::Stream stream_of(int device, bool is_async) {
    auto current = current_stream(device);
    if (!is_async) return current;
    auto [found, is_new] = streams_.try_emplace(device, current);
    if (is_new) found->second = new_stream(device);
    emulated::wait(index_of(found->second), clock_of(index_of(current)));
    return found->second;
  }

  template <typename Act>
  WorkPtr issue(OpType type, bool is_async, const Tensors& inputs, const Tensors& outputs, const Act& act) {
    check(inputs);
    check(outputs);
    auto stream = stream_of(outputs.empty() ? current_device() : outputs[0].device().index(), is_async);
    Kernel kernel(stream);
    for (const auto& each : inputs) kernel.reads(each);
    for (const auto& each : outputs) kernel.writes(each);
    auto id = recorder.add(type, ++sequence_, getGroupUid(), getGroupDesc());
    auto began = std::chrono::steady_clock::now();
    auto release = PyGILState_Check() ? std::make_unique<pybind11::gil_scoped_release>() : nullptr;
    try {
      act();
    } catch (const std::exception& error) {
      auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began);
      if (waited >= limited(options_->timeout)) stop_as_the_watchdog(type, inputs, outputs, waited.count());
      TORCH_CHECK_WITH(DistBackendError, false, "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\nLast error:\n", error.what());
    }
    recorder.retire(id);
    return c10::make_intrusive<Issued>(getRank(), type, inputs, outputs, stream);
  }

  // torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: the watchdog says what timed out and takes the process down.
  [[noreturn]] void stop_as_the_watchdog(OpType type, const Tensors& inputs, const Tensors& outputs, int64_t waited) const {
    int64_t in = 0, out = 0;
    for (const auto& each : inputs) in += each.numel();
    for (const auto& each : outputs) out += each.numel();
    std::fprintf(stderr,
                 "[rank%d]:[E ProcessGroupNCCL.cpp:690] [Rank %d] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=%llu, OpType=%s, NumelIn=%lld, "
                 "NumelOut=%lld, Timeout(ms)=%lld) ran for %lld milliseconds before timing out.\n",
                 getRank(), getRank(), static_cast<unsigned long long>(sequence_), c10d::opTypeToString(type).c_str(), static_cast<long long>(in),
                 static_cast<long long>(out), static_cast<long long>(limited(options_->timeout).count()), static_cast<long long>(waited));
    std::fflush(stderr);
    std::abort();
  }
  void finish(const WorkPtr& work) const { work->wait(options_->timeout); }

  // Sums in fp32 what has 16 bits, and averages and scales as NCCL does; gloo knows neither.
  at::Tensor prepared(const at::Tensor& input, const c10d::ReduceOp& op) const {
    auto host = on_cpu(input).contiguous();
    bool is_narrow = host.is_floating_point() && host.element_size() < 4;
    auto values = is_narrow ? host.to(at::kFloat) : host.clone();
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      const auto* by = reinterpret_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      by->tensor_factor.defined() ? values.mul_(on_cpu(by->tensor_factor)) : values.mul_(by->double_factor);
    }
    return values;
  }
  static c10d::ReduceOp::RedOpType as_gloo(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp::SUM : static_cast<c10d::ReduceOp::RedOpType>(op);
  }
  void put(const at::Tensor& output, at::Tensor values, const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::AVG) values.div_(getSize());
    on_cpu(output).copy_(values.view(output.sizes()));
  }
  void reduce_all(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    Tensors values{prepared(tensor, op)};
    c10d::AllreduceOptions options;
    options.reduceOp = as_gloo(op);
    finish(gloo_->allreduce(values, options));
    put(tensor, values[0], op);
  }
  void scatter_sum(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const {
    auto values = prepared(input, op);
    auto mine = at::empty(output.sizes(), values.options());
    c10d::ReduceScatterOptions options;
    options.reduceOp = as_gloo(op);
    finish(gloo_->_reduce_scatter_base(mine, values, options));
    put(output, mine, op);
  }
  void gather_flat(const at::Tensor& output, const at::Tensor& input) const {
    std::vector<Tensors> parts{moved(output).view(-1).chunk(getSize())};
    Tensors mine{moved(input).contiguous().view(-1)};
    finish(gloo_->allgather(parts, mine, c10d::AllgatherOptions()));
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue(OpType::BROADCAST, options.asyncOp, {}, tensors, [&] {
      auto host = all_moved(tensors);
      finish(gloo_->broadcast(host, options));
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue(OpType::ALLREDUCE, options.asyncOp, {}, tensors, [&] {
      for (auto& each : tensors) reduce_all(each, options.reduceOp);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return issue(OpType::ALLREDUCE_COALESCED, options.asyncOp, {}, tensors, [&] {
      for (auto& each : tensors) reduce_all(each, options.reduceOp);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return issue(OpType::REDUCE, options.asyncOp, {}, tensors, [&] {
      for (auto& each : tensors) {
        auto sum = each.clone();
        reduce_all(sum, options.reduceOp);
        if (getRank() == options.rootRank) on_cpu(each).copy_(on_cpu(sum));
      }
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue(OpType::ALLGATHER, options.asyncOp, inputs, outputs.at(0), [&] {
      auto mine = all_moved(inputs);
      std::vector<Tensors> all{all_moved(outputs[0])};
      finish(gloo_->allgather(all, mine, options));
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue(OpType::_ALLGATHER_BASE, options.asyncOp, {input}, {output}, [&] { gather_flat(output, input); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue(OpType::COALESCED, options.asyncOp, inputs, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) gather_flat(outputs[i], inputs[i]);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue(OpType::REDUCE_SCATTER, options.asyncOp, inputs.at(0), outputs, [&] {
      for (int rank = 0; rank < getSize(); ++rank) {
        auto part = inputs[0].at(rank).clone();
        reduce_all(part, options.reduceOp);
        if (rank == getRank()) on_cpu(outputs.at(0)).copy_(on_cpu(part));
      }
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue(OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {input}, {output}, [&] { scatter_sum(output, input, options.reduceOp); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue(OpType::REDUCE_SCATTER_TENSOR_COALESCED, options.asyncOp, inputs, outputs, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) scatter_sum(outputs[i], inputs[i], options.reduceOp);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return issue(OpType::GATHER, options.asyncOp, inputs, outputs.empty() ? Tensors{} : outputs[0], [&] {
      auto mine = all_moved(inputs);
      std::vector<Tensors> all;
      for (const auto& each : outputs) all.push_back(all_moved(each));
      finish(gloo_->gather(all, mine, options));
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return issue(OpType::SCATTER, options.asyncOp, inputs.empty() ? Tensors{} : inputs[0], outputs, [&] {
      auto mine = all_moved(outputs);
      std::vector<Tensors> all;
      for (const auto& each : inputs) all.push_back(all_moved(each));
      finish(gloo_->scatter(mine, all, options));
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& options) override {
    return issue(OpType::ALLTOALL_BASE, options.asyncOp, {input}, {output}, [&] {
      auto to = moved(output), from = moved(input);
      finish(gloo_->alltoall_base(to, from, out_splits, in_splits, options));
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return issue(OpType::ALLTOALL, options.asyncOp, inputs, outputs, [&] {
      auto mine = all_moved(inputs), theirs = all_moved(outputs);
      theirs.at(getRank()).copy_(mine.at(getRank()));
      std::vector<WorkPtr> begun;
      for (int rank = 0; rank < getSize(); ++rank) {
        if (rank == getRank()) continue;
        Tensors one{mine[rank].contiguous()}, other{theirs[rank]};
        begun.push_back(gloo_->send(one, rank, 7));
        begun.push_back(gloo_->recv(other, rank, 7));
      }
      for (auto& work : begun) finish(work);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return issue(OpType::SEND, true, tensors, {}, [&] {
      auto host = all_moved(tensors);
      finish(gloo_->send(host, to, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return issue(OpType::RECV, true, {}, tensors, [&] {
      auto host = all_moved(tensors);
      finish(gloo_->recv(host, from, tag));
    });
  }
  // A barrier of NCCL is an all-reduce for which the host waits.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = issue(OpType::BARRIER, false, {}, {}, [&] { finish(gloo_->barrier(options)); });
    host_synchronises(Wait::stream, "barrier");
    host_waits_for(clock_of(index_of(current_stream(current_device()))));
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  std::map<int, c10::Stream> streams_;
  uint64_t sequence_ = 0;
};

// What DistributedDataParallel times its backward with.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    return from == c10d::kUnsetTime || to == c10d::kUnsetTime || to < from ? std::nullopt : std::make_optional(to - from);
  }
};
using c10d::TimerRegistry;
using RegistererTimerRegistry = c10d::RegistererTimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Timer)

c10::intrusive_ptr<Nccl> make_group(const pybind11::object& store, int rank, int size, const c10::intrusive_ptr<Options>& options) {
  auto gloo = pybind11::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo")(store, rank, size, pybind11::cast(limited(options->timeout)));
  return c10::make_intrusive<Nccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, options);
}
}  // namespace

void bind_nccl(pybind11::module_& module) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");
  module.def("collectives", [] {
    py::list out;
    for (const auto& each : recorder.entries()) {
      py::dict one;
      one["record_id"] = each.id, one["pg_id"] = 0, one["process_group"] = py::make_tuple(each.group, each.description);
      one["collective_seq_id"] = each.is_p2p ? 0 : each.sequence, one["p2p_seq_id"] = each.is_p2p ? each.sequence : 0, one["op_id"] = each.id;
      one["profiling_name"] = each.name, one["state"] = each.retired ? "completed" : "started";
      one["is_p2p"] = each.is_p2p, one["retired"] = each.retired, one["frames"] = py::list();
      out.append(one);
    }
    return out;
  });
  auto group = py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "ProcessGroupNCCL");
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(group, "Options", py::dynamic_attr())
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  group.def(py::init(&make_group))
      .def("perform_nocolor_split", [](Nccl&, const py::object&) {})
      .def("_set_default_timeout", [](Nccl& self, std::chrono::milliseconds timeout) { self.setTimeout(timeout); })
      .def_property_readonly("options", [](Nccl& self) { return self.options_; });
}
}  // namespace emulated
