//! Devices and streams to and from cudarc: so that a program which uses cudarc gives its memory to
//! this crate without giving up its context, its streams, or its kernels.

use std::sync::Arc;

use aquifer_device::{Code, Device, DeviceError, Driver, Operation, RawStream, Result, Stream, fork};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use crate::context::GpuContext;
use crate::context_state::ContextState;
use crate::driver::CudaDriver;
use crate::installation::Installation;
use crate::objects::StreamEntry;
use crate::raw::{handle, pointer};
use crate::streams::{self, is_default};

/// The device of a GPU, in its primary context. If the GPU is open already, this is another handle
/// of that device: two libraries in one program share it, its streams, and the known order between
/// them. The last handle closes it. `aquifer::open` uses this.
///
/// ```no_run
/// use aquifer::device::cuda;
/// let device = cuda::shared(0)?;
/// assert_eq!(cuda::shared(0)?.id(), device.id());
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// When no driver or no such GPU can be used.
pub fn shared(ordinal: u32) -> Result<Device> {
    fork::check(Operation::Init)?;
    let context = GpuContext::primary(Installation::find()?, ordinal)?;
    // Another reference to `context` outlives the call, so that the context is not given up under
    // the lock of its device.
    context.shared.device(|| CudaDriver::new(context.clone(), ordinal))
}

/// The device of a context that the caller made with cudarc: the one that the context has already,
/// as the primary context does once [`shared`] opened it, or else a new one. The device keeps the
/// context alive. Another context of the same GPU is another device.
///
/// ```no_run
/// use aquifer::device::cuda;
/// use cudarc::driver::CudaContext;
/// let context = CudaContext::new(0)?;
/// let device = cuda::device_of(context.clone())?;
/// assert_eq!(cuda::device_of(context)?.id(), device.id());
/// assert_eq!(cuda::shared(0)?.id(), device.id());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the context's GPU cannot be asked about.
pub fn device_of(context: Arc<CudaContext>) -> Result<Device> {
    fork::check(Operation::Init)?;
    let device = ContextState::find(handle(context.cu_ctx())).device(|| CudaDriver::from_context(context.clone()))?;
    driver_of(device.driver(), Operation::Init)?.keep_context(context);
    Ok(device)
}

/// cudarc's object of a device's context, to make streams, modules and memory of cudarc's own in
/// it.
///
/// # Errors
/// When the device is simulated, or cudarc cannot use the driver that the device uses.
pub fn context_of(device: &Device) -> Result<Arc<CudaContext>> {
    let driver = driver_of(device.driver(), Operation::Init);
    let context = driver.map_err(|error| error.of_request("no context was lent"))?.cudarc_context();
    device.complete(context)
}

/// cudarc's object of a stream, to enqueue work of cudarc's on it. The stream lives as long as the
/// object does.
///
/// The caller orders cudarc's work and memory after that of others: its events, if they are on,
/// know nothing of this crate's.
///
/// # Errors
/// When the stream's device is simulated, cudarc cannot use its driver, the stream is another
/// thread's default stream, or it was adopted by its handle.
pub fn stream_of(stream: &Stream) -> Result<Arc<CudaStream>> {
    let operation = Operation::StreamId;
    let raw = stream.usable(operation).map_err(not_lent)?;
    let stream_of = driver_of(stream.driver(), operation).map_err(not_lent)?.cudarc_stream(raw);
    stream.complete(stream_of)
}

/// The device's stream for a stream of cudarc's, so that two libraries in one program share it: one
/// that was created here and lent with [`stream_of`], one that was adopted before, a default
/// stream, or else the stream is adopted now. Its ticks also cover work that cudarc enqueues.
///
/// An adopted stream is kept alive until [`forget_stream`], or until the last handle of the device
/// is dropped. Threads that ask for one stream at the same time get one stream.
/// [`Device::stream_from_raw`] does the same for a bare handle.
///
/// ```no_run
/// use aquifer::device::cuda;
/// let device = cuda::shared(0)?;
/// let theirs = cuda::context_of(&device)?.new_stream()?;
/// let stream = cuda::stream(&device, &theirs)?;
/// assert_eq!(cuda::stream(&device, &theirs)?.id(), stream.id());
/// device.stream()?.wait_for(&stream.tick())?; // after the work of cudarc's
/// cuda::forget_stream(&device, &theirs)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the device is simulated, the stream belongs to another context, or it is a stream of the
/// device whose last handle was dropped and that is being destroyed.
pub fn stream(device: &Device, stream: &Arc<CudaStream>) -> Result<Stream> {
    let (driver, raw) = of_device(device, stream, "the stream was not adopted")?;
    // SAFETY: the stream lives now, and cudarc's object keeps it alive while it is adopted: see
    // below.
    let ours = unsafe { device.stream_from_raw(raw) }?;
    if !is_default(raw) && !streams::keep(&driver.gpu, raw, stream) {
        return Err(DeviceError::refused(Operation::StreamId, Code::INVALID_HANDLE)
            .of_request("the stream was not adopted")
            .with_detail(
                "it is a stream of the device that is being destroyed; keep a `Stream` of it while cudarc uses it",
            ));
    }
    Ok(ours)
}

/// Releases a stream that [`stream()`] adopted, so that the device does not keep it alive any more.
/// Its ticks stay answerable; calls on handles of it fail from now on. Does nothing for other
/// streams.
///
/// # Errors
/// When the device is simulated, or the stream belongs to another context; as those of
/// [`Device::forget_stream`].
pub fn forget_stream(device: &Device, stream: &CudaStream) -> Result<()> {
    let (_, raw) = of_device(device, stream, "the stream was not released")?;
    device.forget_stream(raw)
}

/// The driver of a device, and the handle of a stream of cudarc's in its context.
fn of_device<'a>(
    device: &'a Device,
    stream: &CudaStream,
    request: &'static str,
) -> Result<(&'a CudaDriver, RawStream)> {
    let operation = Operation::StreamId;
    let driver = driver_of(device.driver(), operation).map_err(|error| error.of_request(request))?;
    if driver.gpu.context.is(stream.context()) {
        return Ok((driver, RawStream(handle(stream.cu_stream()))));
    }
    Err(DeviceError::refused(operation, Code::INVALID_HANDLE).of_request(request).with_detail(
        "the stream belongs to another context than the device; `cuda::device_of` gives the device of its context",
    ))
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
    /// Keeps cudarc's object of the context, unless there is one already.
    fn keep_context(&self, context: Arc<CudaContext>) {
        // cudarc makes the context current when it drops an object, and leaves it so; this restores
        // the thread's own.
        let _current = self.gpu.context.enter_relaxed(Operation::Init).ok();
        let _ = self.gpu.context.cudarc.set(context);
    }

    fn cudarc_context(&self) -> Result<Arc<CudaContext>> {
        if let Some(context) = self.gpu.context.cudarc.get() {
            return Ok(context.clone());
        }
        let operation = Operation::Init;
        // cudarc makes the context current and leaves it so; this restores the thread's own.
        let _current = self.gpu.context.enter_relaxed(operation)?;
        let ordinal = usize::try_from(self.gpu.info.ordinal).unwrap_or(usize::MAX);
        let context = CudaContext::new(ordinal).map_err(|error| of_cudarc(operation, error))?;
        if !self.gpu.context.is(&context) {
            return Err(DeviceError::refused(operation, Code(803)).of_request("no context was lent").with_detail(
                "cudarc uses another driver library than this crate: is a toolkit's stub on the library path?",
            ));
        }
        Ok(self.gpu.context.cudarc.get_or_init(|| context).clone())
    }

    fn cudarc_stream(&self, raw: RawStream) -> Result<Arc<CudaStream>> {
        let context = self.cudarc_context()?;
        if is_default(raw) {
            let per_thread = raw == RawStream::PER_THREAD;
            return Ok(if per_thread { context.per_thread_stream() } else { context.default_stream() });
        }
        let operation = Operation::StreamId;
        let entry =
            self.gpu.streams.get(raw.0).ok_or_else(|| not_lent(crate::handles::dead(operation, "stream", raw.0)))?;
        match &*entry {
            StreamEntry::Owned(object) => {
                // SAFETY: the stream lives, is of this context, and is not destroyed while the
                // object is lent out.
                let lend = || unsafe { context.wrap_borrowed_stream(pointer(object.raw())) };
                Ok(object.extra.0.get_or_init(lend).clone())
            }
            StreamEntry::Adopted(adopted) => adopted.get().cloned().ok_or_else(|| {
                not_lent(DeviceError::refused(operation, Code::NOT_PERMITTED))
                    .with_detail("the stream was adopted by its handle, so its owner may destroy it at any time")
            }),
        }
    }
}
