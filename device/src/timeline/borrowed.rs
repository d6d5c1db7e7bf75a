//! Work that uses borrowed memory: blocking copies from and to the caller's slices.
//!
//! Invariant: a borrow ends at return, so at return nothing that was enqueued uses the memory any more. The driver's result for enqueuing
//! says nothing about that, because part of a failed copy may be under way. So the host also waits after an error, for as long as it takes,
//! unless nothing runs on the device any more. That is so if the device is lost, or if waiting for it keeps failing although nothing
//! captures: such persistent errors are those of a broken context, whose work has ended.
//!
//! A capture would break the invariant, because the graph would use the memory whenever it is launched. So nothing is enqueued on a stream
//! that captures, or during a capture that forbids waiting for the stream, and this library begins no capture on the stream meanwhile.

use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

use super::capturing::{capture_error, unannounced_error};
use super::{GONE, Timeline};
use crate::capturing_streams::BlockingHeldOff;
use crate::driver::{CaptureStatus, Driver, RawStream};
use crate::error::{DeviceError, ErrorKind, Operation, Result};

/// How long the host sleeps between two attempts to wait, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(16);

/// How often waiting for the device may fail, for another reason than a capture, before the device counts as one where nothing runs any
/// more.
const REFUSALS_MAX: u32 = 64;

/// Number of attempts after which the log says that the host still waits, and then each time that the number has doubled.
const ATTEMPTS_NOTED: u32 = 32;

/// A guard: work that uses borrowed memory is under way while it lives.
struct Borrow<'a>(&'a Timeline);

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.borrowed = state.borrowed.saturating_sub(1);
    }
}

impl Timeline {
    /// Calls `enqueue`, which enqueues work that uses borrowed memory, and waits on the host until that work is done, whether `enqueue`
    /// succeeds or fails.
    ///
    /// # Errors
    /// When the call is refused; the error of `enqueue`; when the device is lost. Nothing uses the memory any more then.
    pub(crate) fn run_and_wait(
        &self,
        operation: Operation,
        enqueue: impl FnOnce(RawStream) -> Result<()>,
    ) -> Result<()> {
        let raw = self.usable(operation)?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(self.closed_error(operation, GONE));
        }
        if state.capture.is_some() {
            return Err(capture_error(
                operation,
                "the host cannot wait for work of a capturing stream: use another one",
            ));
        }
        let held_off = self.spare_captures(raw, operation)?;
        self.refuse_capture_of_others(raw)?;
        state.borrowed += 1;
        drop(state);
        // Dropped whatever happens in the driver.
        let _borrow = Borrow(self);
        match enqueue(raw) {
            Err(error) if error.is_device_lost() => Err(error),
            enqueued => {
                let waited = self.wait_for_work(raw, operation, held_off);
                enqueued.and(waited)
            }
        }
    }

    /// Refuses a stream that another library captures, or that cannot be waited for because of such a capture: this very thread may be the
    /// one that is to end it. So the driver is asked about every stream, even of simulated devices, and even the legacy stream.
    fn refuse_capture_of_others(&self, raw: RawStream) -> Result<()> {
        match self.context.driver.capture_status(raw)? {
            CaptureStatus::None => Ok(()),
            _ => Err(unannounced_error()),
        }
    }

    /// Waits on the host until the work enqueued on the stream is done, by waiting for the stream or the device, whichever the driver
    /// allows. Fails only if nothing runs on the device any more.
    fn wait_for_work(&self, raw: RawStream, operation: Operation, held_off: Option<BlockingHeldOff<'_>>) -> Result<()> {
        let mut held_off = Some(Ok(held_off));
        let reached = self.begin_wait();
        let (mut pause, mut attempts, mut refusals) = (PAUSE_MIN, 0_u32, 0);
        loop {
            // Captures are not held off while the host sleeps: the thread that ends a capture in the way may have to begin another one
            // first.
            let held_off = held_off.take().unwrap_or_else(|| self.spare_captures(raw, operation));
            let attempt = held_off.map_or_else(ControlFlow::Continue, |held_off| self.try_to_wait(raw, held_off));
            let error = match attempt {
                ControlFlow::Break(waited) => return waited.inspect(|()| self.mark_done(reached)),
                ControlFlow::Continue(error) => error,
            };
            attempts = attempts.saturating_add(1);
            refusals += u32::from(error.kind != ErrorKind::Capture);
            if refusals == REFUSALS_MAX {
                return Err(error.with_more("the device cannot be waited for, and is taken to run nothing any more"));
            }
            if attempts >= ATTEMPTS_NOTED && attempts.is_power_of_two() {
                tracing::warn!(%error, attempts, "a blocking copy cannot be waited for yet; its memory stays borrowed");
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Waits for the stream or, if that fails, for the device. Returns `Continue` with an error after which the work may still run.
    fn try_to_wait(
        &self,
        raw: RawStream,
        held_off: Option<BlockingHeldOff<'_>>,
    ) -> ControlFlow<Result<()>, DeviceError> {
        let driver = &self.context.driver;
        let waited = driver.synchronize_stream(raw);
        drop(held_off);
        let error = match waited {
            Err(error) if !error.is_device_lost() => error,
            waited => return ControlFlow::Break(waited),
        };
        // A capture that another library began since forbids it. It ends some time, and forbids waiting for the device, too.
        if error.kind == ErrorKind::Capture {
            return ControlFlow::Continue(error);
        }
        // This very thread may be the one that captures, so the end of such a capture is not waited for here.
        let Some(_held_off) = self.context.capturing.hold_off() else { return ControlFlow::Continue(error) };
        match driver.synchronize() {
            Err(error) if !is_gone(&error) => ControlFlow::Continue(error),
            waited => ControlFlow::Break(waited),
        }
    }
}

/// True if an error of waiting for the whole device means that nothing runs there any more. The call's only argument is the context, so an
/// error about something invalid means the context.
fn is_gone(error: &DeviceError) -> bool {
    matches!(error.kind, ErrorKind::DeviceLost | ErrorKind::InvalidUse | ErrorKind::Unavailable)
}
