//! Foreign code on threads of the runtime: destructors of owners that callers hand over, wakers of
//! tasks, and panics.
//!
//! Foreign code may wait for anything, including transfers. So a thread that transfers wait for
//! does not run it: such a thread is *deferring*, and a background thread runs the code instead. A
//! call never waits for another call: one that finds no idle background thread gets a new one.
//! Background threads also wait for the ticks that tasks ask for (`waiter`).
//!
//! Invariant: a deferring thread runs no destructor or waker of the caller.
//!
//! The lock is a leaf. Foreign code runs without it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use aquifer_device::executor;
use aquifer_device::fork::{Condvar, Mutex};
use aquifer_device::internal::defer_panics_here;

use crate::error::TransferError;

/// The idle time after which a background thread ends.
const IDLE: Duration = Duration::from_secs(2);

/// The source of a panic outside of code of the caller.
pub(crate) const DRIVER: &str = "the driver of the device";

type Call = Box<dyn FnOnce() + Send>;

static BACKGROUND: Mutex<Background> = Mutex::new(Background { queue: VecDeque::new(), threads: 0, idle: 0 });
static QUEUED: Condvar = Condvar::new();

struct Background {
    queue: VecDeque<Call>,
    threads: usize,
    /// Threads that wait for a call, or were woken for one that they have not taken yet.
    idle: usize,
}

thread_local! {
    static DEFERRING: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work` on a thread for which others may wait if it is `deferring`: [`run`] uses another
/// thread meanwhile, or else this one.
pub(crate) fn with_deferring<R>(deferring: bool, work: impl FnOnce() -> R) -> R {
    let before = DEFERRING.replace(deferring);
    let result = work();
    DEFERRING.set(before);
    result
}

/// Whether other threads may wait for this one.
pub(crate) fn is_deferring() -> bool {
    // A thread that is ending has done its work.
    DEFERRING.try_with(Cell::get).unwrap_or(false)
}

/// Runs foreign code: on another thread if this one is deferring, else at once. A panic in it is
/// logged and goes no further.
pub(crate) fn run(what: &'static str, code: impl FnOnce() + Send + 'static) {
    if is_deferring() {
        send(Box::new(move || contain(what, code)));
    } else {
        contain(what, code);
    }
}

/// Calls code that may panic, and returns the panic as an error. Values that the code leaves behind
/// may be inconsistent: callers must not read them after an error.
///
/// # Errors
/// Those of the call, and [`TransferError::Panicked`].
pub fn guarded<R, E: From<TransferError>>(what: &'static str, call: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let error = TransferError::panicked(what, panic.as_ref());
        run("the payload of a panic", move || drop(panic));
        Err(error.into())
    })
}

fn contain(what: &'static str, code: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(code)) {
        tracing::error!("{what} panicked");
        // The payload is foreign, too: its drop may panic.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(panic);
        }
    }
}

/// Calls `call` on a background thread; on this one if there is none and none can be started.
pub(crate) fn send(call: Call) {
    let mut background = BACKGROUND.lock();
    background.queue.push_back(call);
    if background.queue.len() <= background.idle {
        QUEUED.notify_one();
        return;
    }
    background.threads += 1;
    drop(background);
    if let Err(error) = executor::spawn(thread::Builder::new().name("aquifer-background".to_owned()), work) {
        let mut background = BACKGROUND.lock();
        background.threads -= 1;
        tracing::error!(%error, "no background thread could be started");
        let rest = if background.threads == 0 { std::mem::take(&mut background.queue) } else { VecDeque::new() };
        drop(background);
        rest.into_iter().for_each(|call| call());
    }
}

fn work() {
    defer_panics_here();
    let mut background = BACKGROUND.lock();
    loop {
        if let Some(call) = background.queue.pop_front() {
            drop(background);
            call();
            // It may have dropped the last buffer of an allocator.
            aquifer_allocator::close_abandoned();
            background = BACKGROUND.lock();
            continue;
        }
        background.idle += 1;
        let timed_out;
        (background, timed_out) = QUEUED.wait_for(background, IDLE);
        background.idle -= 1;
        if timed_out && background.queue.is_empty() {
            background.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Each of many calls waits for the next one. All panic, with a payload that panics when
    /// dropped.
    #[test]
    fn code_that_waits_for_other_code_runs() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("once more");
            }
        }
        let mut before = None;
        let (last, done) = channel();
        for nth in 0..20 {
            let (send, receive) = channel::<()>();
            let (before, last) = (before.replace(send), last.clone());
            with_deferring(true, || {
                run("a test", move || {
                    if nth < 19 {
                        receive.recv().unwrap();
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
    fn a_thread_that_does_not_defer_runs_code_at_once() {
        let here = thread::current().id();
        let (send, receive) = channel();
        run("a test", move || send.send(thread::current().id()).unwrap());
        assert_eq!(receive.try_recv(), Ok(here));
    }
}
