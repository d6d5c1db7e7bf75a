//! Work that uses borrowed memory: blocking copies from and to the caller's slices.
//!
//! Invariant: a borrow ends at return, so at return nothing that was enqueued uses the memory any
//! more. The driver's result for enqueuing says nothing about that, because part of a failed copy
//! may be under way. So the host also waits after an error, for as long as it takes, unless nothing
//! runs on the device any more: it is lost, or waiting for it keeps failing although nothing
//! captures. Such persistent errors are those of a broken context, whose work has ended.
//!
//! A capture would break the invariant, because the graph would use the memory whenever it is
//! launched. So nothing is enqueued on a stream that captures, or during a capture that forbids
//! waiting for the stream, and this library begins no capture on the stream meanwhile.

use std::time::Duration;

use super::capturing::unannounced_error;
use super::{GONE, Timeline};
use crate::capturing_streams::BlockingHeldOff;
use crate::context::Waited;
use crate::driver::{CaptureStatus, Driver, RawStream};
use crate::error::{DeviceError, ErrorKind, Operation, Result};
use crate::executor;

/// How long the host sleeps between two attempts to wait.
const PAUSE: Duration = Duration::from_millis(1);

/// How often waiting may fail, for another reason than a capture, before the device counts as one
/// where nothing runs any more.
const REFUSALS_MAX: u32 = 64;

/// A guard: work that uses borrowed memory is under way while it lives.
struct Borrow<'a>(&'a Timeline);

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.borrowed = state.borrowed.saturating_sub(1);
    }
}

impl Timeline {
    /// Calls `enqueue`, which enqueues work that uses borrowed memory, and waits on the host until
    /// that work is done, whether `enqueue` succeeds or fails.
    ///
    /// # Errors
    /// When the call is refused; the error of `enqueue`; when the device is lost. Nothing uses the
    /// memory any more then.
    pub(crate) fn run_and_wait(
        &self,
        operation: Operation,
        enqueue: impl FnOnce(RawStream) -> Result<()>,
    ) -> Result<()> {
        self.end_abandoned_captures(operation)?;
        let raw = self.usable(operation)?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(self.closed_error(operation, GONE));
        }
        if state.capture.is_some() {
            return Err(DeviceError::in_capture(
                operation,
                "the host cannot wait for work of a capturing stream: use another one",
            ));
        }
        let held_off = self.protect_captures(raw, operation)?;
        self.refuse_capture_of_others(raw)?;
        state.borrowed += 1;
        drop(state);
        // Dropped even if the driver panics.
        let _borrow = Borrow(self);
        match enqueue(raw) {
            Err(error) if error.is_device_lost() => Err(error),
            enqueued => {
                let waited = self.wait_for_work(raw, operation, held_off);
                enqueued.and(waited)
            }
        }
    }

    /// Refuses a stream that another library captures, or that cannot be waited for because of such
    /// a capture: this very thread may be the one that is to end it. So the driver is asked about
    /// every stream, even of virtual devices, and even the legacy stream.
    fn refuse_capture_of_others(&self, raw: RawStream) -> Result<()> {
        match self.context.driver.capture_status(raw)? {
            CaptureStatus::None => Ok(()),
            _ => Err(unannounced_error()),
        }
    }

    /// Waits on the host until the work enqueued on the stream is done, by waiting for the stream
    /// or, if that fails, for the device. Tries again while a capture of another library forbids
    /// it, because that ends some time. Fails only if nothing runs on the device any more.
    fn wait_for_work(&self, raw: RawStream, operation: Operation, held_off: Option<BlockingHeldOff<'_>>) -> Result<()> {
        let driver = &self.context.driver;
        let (reached, mut refusals) = (self.begin_wait(), 0);
        let mut held_off = Ok(held_off);
        loop {
            let waited = held_off.as_ref().map_err(Clone::clone).and_then(|_held_off| driver.synchronize_stream(raw));
            let waited = waited.or_else(|error| match error.kind {
                ErrorKind::DeviceLost | ErrorKind::Capture => Err(error),
                // This very thread may be the one that captures, so the end of such a capture is
                // not waited for here.
                _ => match self.context.capturing.hold_off() {
                    Some(_held_off) => driver.synchronize(),
                    None => Err(error),
                },
            });
            match waited {
                Ok(()) => {
                    self.mark_done(reached);
                    return Ok(());
                }
                Err(error) if error.is_device_lost() => return Err(error),
                Err(error) if error.kind != ErrorKind::Capture && refusals == REFUSALS_MAX => {
                    return Err(
                        error.with_more("the device cannot be waited for, and is taken to run nothing any more")
                    );
                }
                // The thread that ends the capture in the way may have to begin another one first,
                // so captures are not held off while the host sleeps.
                Err(error) if error.kind == ErrorKind::Capture => held_off = Ok(None),
                Err(_) => refusals += 1,
            }
            executor::pause(PAUSE);
            if !matches!(held_off, Ok(Some(_))) {
                held_off = self.protect_captures(raw, operation);
            }
        }
    }
}
