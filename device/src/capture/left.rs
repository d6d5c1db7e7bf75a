//! Captures of per-thread default streams whose thread ends. Nobody else can end such a capture, and the stream is gone with its thread.
//!
//! A thread makes no driver call as it ends. So the capture counts as over for its streams, and objects that would make driver calls when
//! dropped are kept until a device is next opened or settled.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Scope;
use crate::error::{Code, DeviceError, Operation, Result};

/// Captures that their threads left open.
static LEFT: Mutex<Vec<Arc<Scope>>> = Mutex::new(Vec::new());

/// The captures of the calling thread's default streams.
struct OfThread(RefCell<Vec<Weak<Scope>>>);

impl Drop for OfThread {
    fn drop(&mut self) {
        for scope in self.0.get_mut().drain(..).filter_map(|scope| scope.upgrade()) {
            scope.give_up();
            LEFT.lock().push(scope);
        }
    }
}

thread_local! {
    static OF_THREAD: OfThread = const { OfThread(RefCell::new(Vec::new())) };
}

/// Registers a capture that is about to begin, so that it is over when the calling thread ends.
///
/// # Errors
/// When the thread is ending already.
pub(super) fn end_with_thread(scope: &Arc<Scope>) -> Result<()> {
    let noted = OF_THREAD.try_with(|OfThread(scopes)| {
        let mut scopes = scopes.borrow_mut();
        scopes.retain(|scope| scope.upgrade().is_some_and(|scope| !scope.is_over()));
        scopes.push(Arc::downgrade(scope));
    });
    noted.map_err(|_| {
        DeviceError::new(Operation::BeginCapture, Code::CAPTURE_UNSUPPORTED)
            .with_detail("the thread is ending, and its default stream with it")
    })
}

/// Drops the captures that threads left. Makes driver calls if the last handle of a device is dropped with them.
pub(crate) fn let_go() {
    // Taken out first: no driver call is made under a lock.
    let left = std::mem::take(&mut *LEFT.lock());
    drop(left);
}
