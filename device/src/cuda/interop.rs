//! Devices and streams to and from cudarc: so that a program which uses cudarc gives its memory to this crate without giving
//! up its context, its streams, or its kernels.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::driver::CudaDriver;
use super::raw::{handle, pointer};
use super::streams::{Entry, is_default};
use crate::device::Device;
use crate::driver::{Driver, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::external::ExternalStream;
use crate::stream::Stream;

/// A GPU as a device, in its primary context.
///
/// # Errors
/// When no driver or no such GPU can be used.
pub fn open(ordinal: u32) -> Result<Device> {
    CudaDriver::open(ordinal).map(|driver| Device::new(driver))
}

/// The device of a context that the caller made with cudarc. The context is kept as long as the device.
///
/// # Errors
/// When the context's GPU cannot be asked about.
pub fn device_of(context: Arc<CudaContext>) -> Result<Device> {
    CudaDriver::from_context(context).map(|driver| Device::new(driver))
}

/// cudarc's object of a device's context, to make streams, modules and memory of cudarc's own in it.
///
/// # Errors
/// When the device is simulated, or cudarc cannot use the driver that the device uses.
pub fn context_of(device: &Device) -> Result<Arc<CudaContext>> {
    let driver = driver_of(device.driver(), Operation::Init);
    let context = driver.map_err(|error| error.of_request("no context was lent"))?.cudarc_context();
    device.context().driver.heard(context)
}

/// cudarc's object of a stream, to enqueue work of cudarc's on it. The stream lives as long as the object does.
///
/// Whoever uses it orders cudarc's work and memory after that of others: its events, if they are on, know nothing of this crate's.
///
/// # Errors
/// When the stream's device is simulated, cudarc cannot use its driver, the stream is another thread's default stream, or
/// it was adopted by its handle.
pub fn stream_of(stream: &Stream) -> Result<Arc<CudaStream>> {
    let operation = Operation::StreamId;
    let raw = stream.timeline().usable(operation).map_err(not_lent)?;
    let stream_of = driver_of(stream.driver(), operation).map_err(not_lent)?.cudarc_stream(raw);
    stream.context().driver.heard(stream_of)
}

/// Takes part in the ordering of a stream of cudarc's, which is kept alive until this is released or dropped.
///
/// The default streams need no adopting: their streams here are handed out as they are.
///
/// # Errors
/// When the device is simulated, the stream belongs to another context, or it is a stream of the device already.
pub fn adopt(device: &Device, stream: Arc<CudaStream>) -> Result<Adopted> {
    let operation = Operation::StreamId;
    let not_adopted = |error: DeviceError| error.of_request("the stream was not adopted");
    let driver = driver_of(device.driver(), operation).map_err(not_adopted)?;
    let wrong = |code, detail: &str| Err(not_adopted(DeviceError::refused(operation, code).with_detail(detail)));
    if !driver.core.is(stream.context()) {
        return wrong(Code::INVALID_HANDLE, "the stream belongs to another context than the device");
    }
    let raw = RawStream(handle(stream.cu_stream()));
    if is_default(raw) {
        let ours =
            if raw == RawStream::PER_THREAD { device.per_thread_stream() } else { device.default_stream().clone() };
        return Ok(Adopted { stream: ours, external: None });
    }
    if !driver.adopt_kept(raw, stream) {
        return wrong(
            Code::INVALID_VALUE,
            "it is a stream of this device already, created here or adopted before; use that stream, or release it first",
        );
    }
    // SAFETY: the driver just took the reference that keeps the stream alive until it is released. It was not adopted, and nobody else
    // adopts it meanwhile, as that is found out and done in one step.
    let external = unsafe { device.adopt_stream(raw) };
    Ok(Adopted { stream: external.stream().clone(), external: Some(external) })
}

/// A stream of cudarc's, adopted by a device: a [`Stream`] until it is released or dropped, after which it takes no calls.
#[derive(Debug)]
#[must_use = "the stream is released when this is dropped"]
pub struct Adopted {
    stream: Stream,
    /// `None` for a default stream, which is not released.
    external: Option<ExternalStream>,
}

impl Adopted {
    /// Records a last event, so that the stream's ticks stay answerable, and lets the stream go.
    ///
    /// # Errors
    /// As those of [`ExternalStream::release`]: it stays adopted while it captures.
    pub fn release(&mut self) -> Result<()> {
        self.external.as_mut().map_or(Ok(()), ExternalStream::release)
    }
}

impl Deref for Adopted {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

fn not_lent(error: DeviceError) -> DeviceError {
    error.of_request("the stream was not lent to cudarc")
}

/// The CUDA driver below a device.
fn driver_of(driver: &dyn Driver, operation: Operation) -> Result<&CudaDriver> {
    driver.as_any().and_then(|driver| driver.downcast_ref()).ok_or_else(|| {
        DeviceError::refused(operation, Code::NOT_SUPPORTED)
            .with_detail("the device is not driven by CUDA, so cudarc has nothing to do with it")
    })
}

/// An error of cudarc's. Its own formatting would call the driver.
fn of_cudarc(operation: Operation, error: DriverError) -> DeviceError {
    let error = DeviceError::refused(operation, Code(error.0 as u32)).of_request("no context was lent");
    let name = error.code.name();
    error.with_detail(format!("cudarc could not open the device's context: {name}"))
}

impl CudaDriver {
    fn cudarc_context(&self) -> Result<Arc<CudaContext>> {
        if let Some(context) = self.core.cudarc().get() {
            return Ok(context.clone());
        }
        let operation = Operation::Init;
        // cudarc makes the context current and leaves it so; this restores the thread's own.
        let _current = self.core.enter_relaxed(operation)?;
        let ordinal = usize::try_from(self.info.ordinal).unwrap_or(usize::MAX);
        let context = CudaContext::new(ordinal).map_err(|error| of_cudarc(operation, error))?;
        if !self.core.is(&context) {
            return Err(DeviceError::refused(operation, Code(803)).of_request("no context was lent").with_detail(
                "cudarc uses another driver library than this crate: is a toolkit's stub on the library path?",
            ));
        }
        Ok(self.core.cudarc().get_or_init(|| context).clone())
    }

    fn cudarc_stream(&self, raw: RawStream) -> Result<Arc<CudaStream>> {
        let context = self.cudarc_context()?;
        if is_default(raw) {
            let per_thread = raw == RawStream::PER_THREAD;
            return Ok(if per_thread { context.per_thread_stream() } else { context.default_stream() });
        }
        let operation = Operation::StreamId;
        let entry =
            self.streams.get(raw.0).ok_or_else(|| not_lent(super::handles::dead(operation, "stream", raw.0)))?;
        match &*entry {
            Entry::Owned(object) => {
                // SAFETY: the stream lives, is of this context, and is not destroyed while the object is lent out.
                let lend = || unsafe { context.wrap_borrowed_stream(pointer(object.raw())) };
                Ok(object.extra.0.get_or_init(lend).clone())
            }
            Entry::Adopted(adopted) => adopted.keep.clone().ok_or_else(|| {
                not_lent(DeviceError::refused(operation, Code::NOT_PERMITTED))
                    .with_detail("the stream was adopted by its handle, so its owner may destroy it at any time")
            }),
        }
    }
}

impl fmt::Display for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.stream.id())
    }
}
