//! Memory for captured graphs.
//!
//! A graph uses the addresses that it was captured with whenever it is launched. So memory that is allocated while a stream captures comes
//! from a private pool, which keeps its free memory for its graphs (`pools/graphs.rs`) and gives it to nobody else.

use aquifer_device::{AnnouncedCapture, Code, DeviceError, DriverKind, Operation, Stream};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::pools::{PoolRoute, PrivatePool};

/// While it lives, a stream is known to capture, and the thread that made it allocates from a private pool. Made by [`Allocator::capture`].
#[derive(Debug)]
#[must_use = "the thread goes back to the pools it used before when this is dropped"]
pub struct CaptureRoute {
    // Dropped first, so that the capture is over before the thread allocates from other pools.
    _announced: Option<AnnouncedCapture>,
    _route: PoolRoute,
}

/// Refuses to serve a capturing stream from the default pools: memory freed there goes to others, but the graph would use it whenever it is
/// launched.
pub(crate) fn refuse_capture(stream: &Stream) -> Result<(), AllocError> {
    refuse_capturing(
        stream,
        "memory for a stream that captures must come from a private pool, which keeps it for the graph: hold \
         `Allocator::capture(&stream, &pool)` on this thread while you allocate",
    )
}

/// Refuses to serve a capturing stream with memory outside of all pools, for the same reason.
pub(crate) fn refuse_capture_apart(stream: &Stream) -> Result<(), AllocError> {
    refuse_capturing(
        stream,
        "memory that grows, or can be exported, is no pool's, so nothing would keep it for the graph: get it before the capture \
         begins, and keep it as long as the graph",
    )
}

fn refuse_capturing(stream: &Stream, detail: &str) -> Result<(), AllocError> {
    if !stream.is_capturing() {
        return Ok(());
    }
    let error = DeviceError::refused(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
    Err(error.of_request("nothing was allocated").with_detail(detail).into())
}

impl Allocator {
    /// Announces that `stream` captures, and that allocations of the calling thread until the result is dropped are for the graph: they
    /// come from `pool`. Call it when the capture has begun, whether by [`Stream::begin_capture`], by cudarc, or by another library. Drop
    /// the result when the capture has ended.
    ///
    /// Where a library tells in two steps, as PyTorch does, there is a call for each. PyTorch calls an allocator's `beginAllocateToPool`
    /// before the capture begins, and `endAllocateToPool` after it has ended: between them hold [`PrivatePool::route_thread`]. Hold
    /// [`Stream::announce_capture`] from `markCaptureBegin` to `markCaptureEnd`, or, in versions without these, from the first request of the
    /// stream on.
    ///
    /// Memory of the graph may have been used before the capture by work that is not done yet. [`aquifer_device::Graph::launch`] orders the
    /// graph after that work. A graph that another library launches is ordered only by the stream that it is launched on. If that is not
    /// the stream that it was captured on, launch it after that stream's earlier work.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, PoolOptions};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let (stream, pool) = (device.stream()?, allocator.create_pool(PoolOptions::default())?);
    /// let capture = stream.begin_capture()?;
    /// let route = allocator.capture(&stream, &pool)?;
    /// let scratch = allocator.alloc_bytes(1 << 20, &stream)?;
    /// stream.fill(scratch.ptr(), 7, 1 << 20)?;
    /// drop(scratch); // the pool keeps it for the graph
    /// let graph = capture.end()?;
    /// drop(route);
    /// graph.launch(&stream)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the stream is of another device, the pool is of another allocator, or the stream does not capture; errors of the driver.
    pub fn capture(&self, stream: &Stream, pool: &PrivatePool) -> Result<CaptureRoute, AllocError> {
        aquifer_device::fork::check(Operation::CaptureStatus)?;
        if stream.device_id() != self.device().id() {
            return Err(AllocError::wrong_device("stream", stream.device_id(), self.device().id()));
        }
        pool.check_allocator(self)?;
        let announced = if stream.is_capturing() { None } else { Some(stream.announce_capture()?) };
        Ok(CaptureRoute { _announced: announced, _route: pool.route_thread() })
    }

    /// Asks, without waiting, whether the launches are done that memory of closed pools waits for.
    pub(crate) fn poll_launches(&self) -> Result<(), AllocError> {
        let launched = self.shell().core().awaited_launches(None);
        self.poll(&launched.ticks)
    }

    /// Refuses to serve a request with memory of the default pools if its stream captures unannounced.
    pub(crate) fn refuse_unannounced_capture(&self, slot: u32) -> Result<(), AllocError> {
        if self.device().info().kind != DriverKind::Cuda {
            return Ok(());
        }
        let timeline = self.shell().core().timeline(slot).cloned();
        timeline.map_or(Ok(()), |timeline| Ok(timeline.refuse_unannounced_capture()?))
    }
}
