//! Timing of work on a stream, by the device's own clock.
//!
//! A host clock around calls that enqueue work measures only the enqueuing. This uses the device's
//! clock: the result is available once the device has done the work ([`Timing::elapsed`]), or by
//! waiting ([`Timing::wait`]).

use std::time::Duration;

use aquifer_device::{Device, Event, RequestError, Stream};

use crate::error::TransferError;

/// A measurement that was started on a stream.
///
/// It measures from when the stream begins the work enqueued after the start, to when it is done
/// with the work enqueued before the stop. That includes waits for other streams, and excludes
/// earlier work and the host's time. The resolution is about 0.5 µs. First runs are slower (kernels
/// are loaded, caches filled): measure after a warm-up.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Timer;
/// let device = aquifer::open("sim:24GiB")?;
/// let stream = device.stream()?;
/// let ptr = device.alloc(64 << 20)?;
///
/// let timer = Timer::start(&device, &stream)?;
/// stream.fill(ptr, 0, 64 << 20)?;
/// let timing = timer.stop(&stream)?;
/// assert_eq!(timing.elapsed()?, None); // the device is not there yet
/// assert!(timing.wait()?.as_micros() > 0); // waits for it
/// # device.free(ptr)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is measured unless it is stopped"]
pub struct Timer {
    start: Event,
    stop: Event,
    device_id: u32,
}

impl Timer {
    /// Starts at the end of the work enqueued on the stream. Does not wait.
    ///
    /// # Errors
    /// A stream of another device, and errors of the driver.
    pub fn start(device: &Device, stream: &Stream) -> Result<Timer, TransferError> {
        check_stream(stream, device.id())?;
        let (start, stop) = (device.create_event(true)?, device.create_event(true)?);
        start.record(stream)?;
        Ok(Timer { start, stop, device_id: device.id() })
    }

    /// Stops at the end of the work enqueued on the stream. Does not wait. This may be another
    /// stream of the device, ordered after the work to be measured: one that gets to the stop
    /// before the other gets to the start measures no time.
    ///
    /// # Errors
    /// A stream of another device, and errors of the driver.
    pub fn stop(self, stream: &Stream) -> Result<Timing, TransferError> {
        check_stream(stream, self.device_id)?;
        self.stop.record(stream)?;
        Ok(Timing { start: self.start, stop: self.stop })
    }
}

fn check_stream(stream: &Stream, needed: u32) -> Result<(), RequestError> {
    let is = stream.device_id();
    if is == needed { Ok(()) } else { Err(RequestError::wrong_device("stream", is, needed)) }
}

/// A stopped measurement. Its result is known once the device has done the work.
#[derive(Debug)]
#[must_use = "the measured time is lost otherwise"]
pub struct Timing {
    start: Event,
    stop: Event,
}

impl Timing {
    /// The time of the work; `None` while the device is not done. Does not wait.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn elapsed(&self) -> Result<Option<Duration>, TransferError> {
        if !self.start.is_complete()? || !self.stop.is_complete()? {
            return Ok(None);
        }
        self.measured().map(Some)
    }

    /// Waits on the host until the device is done, and returns the time of the work.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn wait(self) -> Result<Duration, TransferError> {
        // Both, as a measurement may stop on a stream that is ahead of the one it started on.
        self.start.synchronize()?;
        self.stop.synchronize()?;
        self.measured()
    }

    fn measured(&self) -> Result<Duration, TransferError> {
        let milliseconds = self.start.elapsed_ms(&self.stop)?;
        // Negative if the stop's stream was ahead: nothing was measured then.
        Ok(Duration::try_from_secs_f64(milliseconds / 1e3).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use aquifer_kernels::Kernels;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn the_time_of_the_device_is_measured_without_waiting() {
        let device = Device::new(SimDriver::new(SimConfig::default().jitter(false)));
        let (stream, kernels) = (device.stream().unwrap(), Kernels::load(&device).unwrap());
        kernels.spin(&stream, Duration::from_millis(50)).unwrap(); // before: not measured
        let calls = device.driver_calls();
        let timer = Timer::start(&device, &stream).unwrap();
        kernels.spin(&stream, Duration::from_millis(3)).unwrap();
        let timing = timer.stop(&stream).unwrap();
        assert_eq!(timing.elapsed().unwrap(), None);
        let waits = |calls: &aquifer_device::CallCounts| {
            calls.of(aquifer_device::Operation::SynchronizeEvent)
                + calls.of(aquifer_device::Operation::SynchronizeStream)
        };
        assert_eq!(waits(&device.driver_calls().since(&calls)), 0);
        let taken = timing.wait().unwrap();
        assert!((Duration::from_millis(3)..Duration::from_micros(3100)).contains(&taken), "{taken:?}");
    }

    #[test]
    fn a_stop_ahead_of_its_start_measures_nothing() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (one, two, kernels) = (device.stream().unwrap(), device.stream().unwrap(), Kernels::load(&device).unwrap());
        kernels.spin(&one, Duration::from_millis(5)).unwrap();
        let timing = Timer::start(&device, &one).unwrap().stop(&two).unwrap();
        assert_eq!(timing.wait().unwrap(), Duration::ZERO);
    }

    #[test]
    fn streams_of_other_devices_are_refused() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let other = Device::new(SimDriver::new(SimConfig::default()));
        let refused = |result: Result<(), TransferError>| {
            matches!(result, Err(TransferError::Request(RequestError::WrongDevice { .. })))
        };
        assert!(refused(Timer::start(&device, other.default_stream()).map(drop)));
        let timer = Timer::start(&device, device.default_stream()).unwrap();
        assert!(refused(timer.stop(other.default_stream()).map(drop)));
    }
}
