//! The CUDA driver on the first real GPU, of which every test gets a ration of memory. A dry run
//! does the same on a large device of the stand-in, so that this code is tested without a GPU.
//!
//! All tests of a process share the GPU and its context. Long times are cut short: see
//! [`in_truth`].

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aquifer_cuda::CudaDriver;
use aquifer_device::{CaptureStatus, DevicePtr, Driver, RawEvent, RawStream, Result, Stream};
use aquifer_sim::{Fault, SimConfig};
use aquifer_standin::{Number, Rationed, Spin, StandinDevice};
use parking_lot::Mutex;

use super::{Controls, Kind, Mapped, Subject};

/// What a stall of one second takes in truth.
const SECOND: Duration = Duration::from_millis(100);

/// Longer than the work of any test takes, stalls left out.
const SHORT: Duration = Duration::from_millis(5);

/// What a stall of `time` takes in truth: a tenth for a second, and with the square root more for
/// those that are shorter, because host work during five milliseconds of a simulated device may
/// take as long on a real one. Longer stays longer. A stall that must outlast work on the host is
/// of a second: pinning memory in a virtual machine takes tens of milliseconds.
fn in_truth(time: Duration) -> Duration {
    SECOND.mul_f64(time.as_secs_f64().sqrt())
}

/// What the tests of this process share.
#[derive(Debug)]
struct Gpu {
    driver: Arc<CudaDriver>,
    spin: Spin,
    /// The device behind the driver in a dry run. Its time passes only during waits.
    standin: Option<StandinDevice>,
}

impl Gpu {
    /// Opened once and never closed: else the context would go after every test.
    fn get() -> &'static Gpu {
        static GPU: OnceLock<Gpu> = OnceLock::new();
        GPU.get_or_init(|| {
            let standin = (Kind::chosen() == Kind::Rationed).then(|| {
                let standin = aquifer_standin::load().unwrap_or_else(|error| panic!("{error}"));
                // Durations that vary are another run each time, as all tests share the device.
                standin.add_device("h100,jitter=off").unwrap_or_else(|error| panic!("{error}"))
            });
            let ordinal = standin.as_ref().map_or(0, StandinDevice::ordinal);
            let driver = CudaDriver::open(ordinal).unwrap_or_else(|error| panic!("{error}"));
            let spin = Spin::load(driver.clone()).unwrap_or_else(|error| panic!("{error}"));
            warm_up(&driver, &spin).unwrap_or_else(|error| panic!("{error}"));
            Gpu { driver, spin, standin }
        })
    }

    /// The time by the device's clock.
    fn now(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        match &self.standin {
            Some(standin) => Duration::from_nanos(standin.number(Number::NowNs)),
            None => START.get_or_init(Instant::now).elapsed(),
        }
    }

    /// Lets the device work for so long.
    fn pause(&self, time: Duration) {
        match &self.standin {
            Some(standin) => standin.advance(time),
            None => std::thread::sleep(time),
        }
    }
}

/// Makes the calls for which the driver loads code the first time, which may wait for pending work.
fn warm_up(driver: &CudaDriver, spin: &Spin) -> Result<()> {
    const BYTES: u64 = 1 << 20;
    let memory = Driver::alloc(driver, 2 * BYTES)?;
    spin.enqueue(RawStream::LEGACY, Duration::from_micros(1))?;
    driver.memset(memory, 0, BYTES, RawStream::LEGACY)?;
    driver.copy_on_device(memory.offset(BYTES), memory, BYTES, RawStream::LEGACY)?;
    Driver::free(driver, memory)
}

pub(super) fn open(config: &SimConfig) -> Subject {
    let gpu = Gpu::get();
    gpu.standin.iter().for_each(|standin| drop(standin.take_violations()));
    let driver = Arc::new(Rationed::new(gpu.driver.clone(), config));
    let controls = OnHardware { gpu, driver: driver.clone(), start: gpu.now(), stalls: Mutex::default() };
    Subject { driver, controls: Arc::new(controls), simulator: None }
}

/// A stall that may not be over.
#[derive(Debug)]
struct Stall {
    end: RawEvent,
    /// How long it is for the test.
    time: Duration,
}

#[derive(Debug)]
struct OnHardware {
    gpu: &'static Gpu,
    driver: Arc<Rationed>,
    start: Duration,
    stalls: Mutex<Vec<Stall>>,
}

impl OnHardware {
    fn forget(&self, stall: &Stall) {
        self.gpu.driver.destroy_event(stall.end).unwrap_or_else(|error| panic!("{error}"));
    }
}

impl Controls for OnHardware {
    /// A GPU does not tell. In a dry run the device behind it does, of all tests: [`open`] takes
    /// those of earlier tests.
    fn violations(&self) -> Vec<String> {
        self.gpu.standin.as_ref().map(StandinDevice::violations).unwrap_or_default()
    }

    fn inject(&self, fault: Fault) {
        self.driver.inject(fault);
    }

    fn clear_faults(&self) {
        self.driver.clear_faults();
    }

    fn calls_made(&self) -> u64 {
        self.driver.calls_made()
    }

    /// A second is over when a stall of one second would be.
    fn now_ns(&self) -> u64 {
        let passed = (self.gpu.now() - self.start).as_secs_f64() / SECOND.as_secs_f64();
        u64::try_from(Duration::from_secs_f64(passed).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Waits for all that was enqueued, where the time is enough for every stall, else as long as a
    /// stall of that time takes.
    fn advance(&self, time: Duration) {
        let mut stalls = self.stalls.lock();
        let done = stalls.extract_if(.., |stall| self.gpu.driver.query_event(stall.end).is_ok_and(|done| done));
        done.for_each(|stall| self.forget(&stall));
        if stalls.iter().map(|stall| stall.time).sum::<Duration>() > time {
            return self.gpu.pause(in_truth(time));
        }
        for stall in stalls.drain(..) {
            self.gpu.driver.synchronize_event(stall.end).unwrap_or_else(|error| panic!("{error}"));
            self.forget(&stall);
        }
        if !self.driver.wait_for_work().unwrap_or_else(|error| panic!("{error}")) {
            self.gpu.pause(SHORT);
        }
    }

    fn stall(&self, stream: &Stream, time: Duration) -> Result<()> {
        let (gpu, stream) = (&self.gpu.driver, stream.raw());
        self.gpu.spin.enqueue(stream, in_truth(time))?;
        if gpu.capture_status(stream)? == CaptureStatus::None {
            let end = gpu.create_event(false)?;
            self.stalls.lock().push(Stall { end, time });
            gpu.record(end, stream)?;
        }
        Ok(())
    }

    fn set_other_process_bytes(&self, bytes: u64) {
        self.driver.set_other_process_bytes(bytes);
    }

    fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        let (ptr, mapped) = self.driver.mapping_at(ptr)?;
        Some(Mapped { ptr, bytes: mapped.bytes, options: mapped.options, devices: mapped.devices })
    }
}

impl Drop for OnHardware {
    fn drop(&mut self) {
        let stalls = std::mem::take(self.stalls.get_mut());
        stalls.iter().for_each(|stall| self.forget(stall));
    }
}
