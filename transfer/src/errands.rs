//! Foreign code that threads of the runtime come across: drops of owners that callers handed over, and wakers of tasks.
//!
//! Such code may wait for anything, also for transfers, so a thread that transfers wait for does not run it. The code
//! becomes an *errand*, which another thread runs. Errands do not wait for each other: an errand that finds no idle
//! thread gets a new one.
//!
//! Invariant: a thread that is [`on_duty`] runs no foreign code.
//!
//! The lock is a leaf. Errands run without it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use aquifer_device::sim::defer_panics_here;
use parking_lot::{Condvar, Mutex};

/// How long a thread stays without an errand before it ends.
const IDLE: Duration = Duration::from_secs(2);

type Errand = Box<dyn FnOnce() + Send>;

static ERRANDS: Mutex<Errands> = Mutex::new(Errands { queue: VecDeque::new(), threads: 0, idle: 0 });
static CALL: Condvar = Condvar::new();

struct Errands {
    queue: VecDeque<Errand>,
    threads: usize,
    /// Threads that wait for an errand, or were called for one that they have not taken yet.
    idle: usize,
}

thread_local! {
    static ON_DUTY: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work`, for which other threads may wait: errands that it begins run on another thread.
pub(crate) fn on_duty<R>(work: impl FnOnce() -> R) -> R {
    with_duty(true, work)
}

/// Calls `work`, for which no other thread waits: errands that it begins run on this thread.
pub(crate) fn off_duty<R>(work: impl FnOnce() -> R) -> R {
    with_duty(false, work)
}

fn with_duty<R>(duty: bool, work: impl FnOnce() -> R) -> R {
    let before = ON_DUTY.replace(duty);
    let result = work();
    ON_DUTY.set(before);
    result
}

/// Whether other threads may wait for this one.
pub(crate) fn is_on_duty() -> bool {
    // A thread that is ending has done its work.
    ON_DUTY.try_with(Cell::get).unwrap_or(false)
}

/// Runs foreign code: on another thread if this one is on duty, else at once. A panic in it is logged and goes no
/// further.
pub(crate) fn run(what: &'static str, errand: impl FnOnce() + Send + 'static) {
    if is_on_duty() {
        send(Box::new(move || contained(what, errand)));
    } else {
        contained(what, errand);
    }
}

fn contained(what: &'static str, errand: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(errand)) {
        tracing::error!("{what} panicked");
        // The payload is foreign, too: its drop may panic.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(panic);
        }
    }
}

fn send(errand: Errand) {
    let mut errands = ERRANDS.lock();
    errands.queue.push_back(errand);
    if errands.queue.len() <= errands.idle {
        CALL.notify_one();
        return;
    }
    errands.threads += 1;
    drop(errands);
    if let Err(error) = thread::Builder::new().name("aquifer-errands".to_owned()).spawn(work) {
        let mut errands = ERRANDS.lock();
        errands.threads -= 1;
        tracing::error!(%error, "no thread could be started for code of the caller's");
        // If there is no thread at all, this one must run them.
        let left = if errands.threads == 0 { std::mem::take(&mut errands.queue) } else { VecDeque::new() };
        drop(errands);
        left.into_iter().for_each(|errand| errand());
    }
}

fn work() {
    defer_panics_here();
    let mut errands = ERRANDS.lock();
    loop {
        if let Some(errand) = errands.queue.pop_front() {
            drop(errands);
            errand();
            // The errand may have dropped the last buffer of an allocator.
            aquifer_allocator::internal::close_abandoned();
            errands = ERRANDS.lock();
            continue;
        }
        errands.idle += 1;
        let timed_out = CALL.wait_for(&mut errands, IDLE).timed_out();
        errands.idle -= 1;
        if timed_out && errands.queue.is_empty() {
            errands.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Each of many errands waits for the next one. All panic, with a payload that panics when dropped.
    #[test]
    fn errands_that_wait_for_each_other_all_run() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("once more");
            }
        }
        let mut before = None;
        let (last, done) = channel();
        for nth in 0..20 {
            let (tell, told) = channel::<()>();
            let (before, last) = (before.replace(tell), last.clone());
            on_duty(|| {
                run("an errand", move || {
                    if nth < 19 {
                        told.recv().unwrap();
                    }
                    let _ = before.map(|before| before.send(()));
                    last.send(thread::current().id()).unwrap();
                    std::panic::panic_any(Panics);
                });
            });
        }
        drop(last);
        assert_eq!(done.iter().filter(|&id| id != thread::current().id()).count(), 20);
    }

    #[test]
    fn a_thread_that_is_not_on_duty_runs_its_own() {
        let here = thread::current().id();
        let (tell, told) = channel();
        run("an errand", move || tell.send(thread::current().id()).unwrap());
        assert_eq!(told.try_recv(), Ok(here));
    }
}
