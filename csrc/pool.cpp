// The pool: workers wait on a condition variable, so an idle pool costs nothing and leaves the
// cores to others (PyTorch's own threads run between two calls of attention). Waking takes tens of
// microseconds; so one that has just finished looks out for the next job a little while first.
#include "pool.h"

#include <pthread.h>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace multihead {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollEvery = std::chrono::milliseconds(30);
constexpr auto kLookOut = std::chrono::microseconds(30);

// Whether something comes true while looking out for it.
template <typename F>
bool soon(F&& true_now) {
  const auto end = Clock::now() + kLookOut;
  do {
    if (true_now()) return true;
    std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

// One call of run(). Items are handed out by a counter; `cancelled` makes the rest of them vanish.
struct Job {
  Task task;
  int64_t items;
  std::atomic<int64_t> next{0};
  std::atomic<bool> cancelled{false};

  void work(int thread, Interrupted interrupted) {
    auto polled = Clock::now();
    for (;;) {
      if (cancelled.load(std::memory_order_relaxed)) return;
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      task.call(task.self, item, thread);
      if (interrupted && Clock::now() - polled > kPollEvery) {
        if (interrupted()) cancelled.store(true, std::memory_order_relaxed);
        polled = Clock::now();
      }
    }
  }
};

class Pool {
 public:
  // Lends the workers to one job at a time.
  bool try_run(Job& job, int threads, Interrupted interrupted) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) {
        const int thread = static_cast<int>(workers_.size()) + 1;
        try {
          workers_.emplace_back([this, thread] { serve(thread); });
        } catch (const std::system_error&) {
          break;  // the system gives no more threads: those that are there do the work
        }
      }
      job_ = &job;
      wanted_ = threads;
      running_ = 0;
      ++generation_;
    }
    wake_.notify_all();
    job.work(0, interrupted);
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // a worker that wakes late finds nothing to do
    lock.unlock();
    if (soon([this] { return running_ == 0; })) return true;
    lock.lock();
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void serve(int thread) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen && job_; });
      seen = generation_;
      if (thread >= wanted_) continue;
      Job* job = job_;
      ++running_;
      lock.unlock();
      job->work(thread, nullptr);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
      lock.unlock();
      soon([&] { return generation_ != seen; });
      lock.lock();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int wanted_ = 0;
  std::atomic<int> running_{0};
  std::atomic<uint64_t> generation_{0};
};

// The way into an OpenMP runtime that the process has loaded already (share_threads).
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
std::atomic<Parallel> openmp{nullptr};

// A child of fork() has none of its parent's threads: it starts a pool of its own, and leaves the
// parent's, whose locks may be held, alone. The pool lives as long as the process: at exit a
// worker may be waiting inside it.
std::atomic<Pool*> pool{nullptr};

void forget_at_fork() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr), openmp.store(nullptr); });
  (void)registered;
}

Pool& the_pool() {
  forget_at_fork();
  Pool* found = pool.load(std::memory_order_acquire);
  if (found) return *found;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

bool share_threads(const char* folder) {
#if defined(__linux__)
  struct Search {
    const char* folder;
    Parallel found;
  } search{folder, nullptr};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* self) {
        Search& s = *static_cast<Search*>(self);
        if (!object->dlpi_name || std::strncmp(object->dlpi_name, s.folder, std::strlen(s.folder)) != 0 ||
            !std::strstr(object->dlpi_name, "omp"))
          return 0;
        if (void* handle = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD))
          s.found = reinterpret_cast<Parallel>(dlsym(handle, "GOMP_parallel"));
        return s.found ? 1 : 0;
      },
      &search);
  forget_at_fork();
  openmp.store(search.found, std::memory_order_release);
  return search.found != nullptr;
#else
  (void)folder;
  return false;
#endif
}

bool run(int64_t items, int threads, Task task, Interrupted interrupted) {
  if (items <= 0) return true;
  Job job{task, items};
  if (threads <= 1 || items == 1)
    job.work(0, interrupted);
  else if (const Parallel parallel = openmp.load(std::memory_order_acquire)) {
    struct Team {
      Job& job;
      Interrupted interrupted;
      std::thread::id caller;
      std::atomic<int> others{1};
    } team{job, interrupted, std::this_thread::get_id()};
    // Always all threads of the team: another number would make the runtime build a new one.
    parallel(
        [](void* self) {
          Team& t = *static_cast<Team*>(self);
          const bool caller = std::this_thread::get_id() == t.caller;
          t.job.work(caller ? 0 : t.others.fetch_add(1), caller ? t.interrupted : nullptr);
        },
        &team, static_cast<unsigned>(threads), 0);
  } else if (!the_pool().try_run(job, threads, interrupted))
    job.work(0, interrupted);
  return !job.cancelled.load();
}

}  // namespace multihead
