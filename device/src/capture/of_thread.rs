//! Captures of per-thread default streams whose thread ends. Nobody else can end such a capture, and the stream is gone with its thread.
//!
//! A thread makes no driver call as it ends. So the capture counts as over for its streams, and objects that would make driver calls when
//! dropped are kept until a device is next opened or settled.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use super::Scope;
use crate::deferred::{self, Deferred};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork;

/// The captures of the calling thread's default streams.
struct OfThread(RefCell<Vec<Weak<Scope>>>);

impl Drop for OfThread {
    fn drop(&mut self) {
        if fork::is_child() {
            return std::mem::forget(std::mem::take(self.0.get_mut()));
        }
        for scope in self.0.get_mut().drain(..).filter_map(|scope| scope.upgrade()) {
            scope.give_up();
            deferred::keep(Deferred::Capture(scope));
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
        DeviceError::refused(Operation::BeginCapture, Code::CAPTURE_UNSUPPORTED)
            .with_detail("the thread is ending, and its default stream with it")
    })
}
