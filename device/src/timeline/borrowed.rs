//! Work that uses memory which the caller has only lent: blocking copies from and to slices.
//!
//! Invariant: a borrow ends at return, so at return nothing that was enqueued uses the memory any more. The driver's answer to enqueuing
//! says nothing about that, because part of a copy that failed may be under way. So the host also waits after an error, for as long
//! as it takes, unless nothing runs on the device any more. That is so if the device is lost, or if waiting for it keeps failing although
//! nothing captures: such persistent errors are those of a broken context, whose work has ended.
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

/// How often the device may refuse to be waited for, for another reason than a capture, before nothing is taken to run there any more.
const REFUSALS_MAX: u32 = 64;

/// After how many attempts the log says that the host still waits, and then whenever they have doubled.
const ATTEMPTS_NOTED: u32 = 32;

/// Work that uses borrowed memory is under way.
struct Borrow<'a>(&'a Timeline);

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.borrowed = state.borrowed.saturating_sub(1);
    }
}

impl Timeline {
    /// Lets `enqueue` enqueue work that uses memory which the caller has borrowed, and waits on the host until it is done, whatever
    /// `enqueue` answers.
    ///
    /// # Errors
    /// Of a call that is refused, of `enqueue`, or that the device is lost, in this order. Nothing uses the memory any more then.
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
        // Whatever happens in the driver.
        let _borrow = Borrow(self);
        match enqueue(raw) {
            Err(error) if error.is_device_lost() => Err(error),
            enqueued => {
                let waited = self.wait_for_work(raw, operation, held_off);
                enqueued.and(waited)
            }
        }
    }

    /// Refuses a stream that somebody else captures, or that a capture of somebody else's forbids to wait for: this very thread may be the
    /// one that is to end it. So every stream is asked, of simulated devices, too, and the legacy one.
    fn refuse_capture_of_others(&self, raw: RawStream) -> Result<()> {
        match self.context.driver.capture_status(raw)? {
            CaptureStatus::None => Ok(()),
            _ => Err(unannounced_error()),
        }
    }

    /// Waits on the host until what was enqueued on the stream is done, in whatever way the driver lets it. Fails only where nothing runs
    /// any more.
    fn wait_for_work(&self, raw: RawStream, operation: Operation, held_off: Option<BlockingHeldOff<'_>>) -> Result<()> {
        let mut held_off = Some(Ok(held_off));
        let reached = self.begin_wait();
        let (mut pause, mut attempts, mut refusals) = (PAUSE_MIN, 0_u32, 0);
        loop {
            // Not while the host sleeps: who ends a capture that is in the way may have to begin another one.
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

    /// Waits for the stream, or else for the device. Goes on with an error after which the work may still run.
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
        // A capture that somebody else began since forbids it. It ends some time, and forbids to wait for the device just as well.
        if error.kind == ErrorKind::Capture {
            return ControlFlow::Continue(error);
        }
        // This very thread may be the one that captures, so this is no capture that is waited for.
        let Some(_held_off) = self.context.capturing.hold_off() else { return ControlFlow::Continue(error) };
        match driver.synchronize() {
            Err(error) if !is_gone(&error) => ControlFlow::Continue(error),
            waited => ControlFlow::Break(waited),
        }
    }
}

/// Whether an answer to waiting for the whole device says that nothing runs there any more. The call names nothing but the context, so
/// what it calls invalid is that.
fn is_gone(error: &DeviceError) -> bool {
    matches!(error.kind, ErrorKind::DeviceLost | ErrorKind::InvalidUse | ErrorKind::Unavailable)
}
