//! The reserve (`reserve_mb`): frames that are taken when the allocator opens, and stay held from the
//! device. They start spare, and serve as other frames do; memory on its way back to the device
//! becomes spare again while no more than the reserve would be left (`Core::releasable`).

use aquifer_device::{DeviceError, PhysicalOptions};

use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::core::limits::Refusal;
use crate::core::paged::frames::{Frame, sizes};
use crate::error::AllocError;
use crate::recovery::oom::{Tried, out_of_memory};
use crate::tags::Tag;
use crate::types::{PoolId, Request, StreamId};

/// Takes the reserve that the configuration asks for, or nothing.
pub(crate) fn take_reserve(allocator: &Allocator) -> Result<(), AllocError> {
    let reserve = allocator.config().reserve;
    if reserve == 0 {
        return Ok(());
    }
    let mut shared = allocator.state().shared();
    let Some(granule) = shared.paged().map(|paged| paged.granule) else {
        return Err(allocator.not_mapped("a reserve (`reserve_mb`)"));
    };
    shared.reserve = reserve.checked_next_multiple_of(granule).unwrap_or(reserve);
    drop(shared);
    let Some(refusal) = fill(allocator)? else { return Ok(()) };
    allocator.state().shared().reserve = 0;
    let stream = StreamId::of(allocator.device().default_stream());
    let (pool, size) = (PoolId::LARGE, reserve);
    let request = Request { requested: size, size, pool, stream, tag: Tag::default(), is_regular: true };
    let tried = Tried { refusal: Some(refusal), reserve: true, ..Tried::for_dedicated(0) };
    Err(out_of_memory(allocator, &request, tried))
}

/// Takes what waking up left the reserve short of.
pub(crate) fn refill(allocator: &Allocator) {
    match fill(allocator) {
        Ok(None) => {}
        Ok(Some(refusal)) => tracing::warn!(?refusal, "the reserve could not be taken back whole after waking up"),
        Err(error) => tracing::warn!(%error, "the reserve could not be taken back whole after waking up"),
    }
}

/// Creates the frames that the reserve lacks: all of them, or none where something refuses that.
fn fill(allocator: &Allocator) -> Result<Option<Refusal>, AllocError> {
    let room = room(allocator)?;
    let mut shared = allocator.state().shared();
    let lacking = shared.lacks_reserve();
    let Some(paged) = shared.paged().filter(|_| lacking > 0) else { return Ok(None) };
    let (granule, options, largest) = (paged.granule, paged.options, paged.usual_frame());
    let bytes = lacking.saturating_mul(granule);
    let (most, refusal) = buyable(allocator, &shared, &room);
    if bytes > most {
        return Ok(Some(refusal));
    }
    if bytes > allocator.device().info().total_bytes {
        return Ok(Some(Refusal::Device));
    }
    shared.begin_growing(bytes);
    drop(shared);
    let driver = allocator.device().driver();
    let (mut frames, mut failed) = (Vec::new(), None);
    for size in sizes(lacking, largest) {
        match driver.create_physical(u64::from(size) * granule, options) {
            Ok(physical) => frames.push(Frame::new(physical, size)),
            Err(error) => {
                frames.retain(|frame| driver.release_physical(frame.physical).is_err());
                failed = Some(error);
                break;
            }
        }
    }
    allocator.state().shared().add_reserved(frames, bytes);
    match failed {
        None => Ok(None),
        Some(error) if error.is_out_of_memory() => Ok(Some(Refusal::Device)),
        Some(error) => Err(error.into()),
    }
}

/// A frame of the reserve, or a new one. If the device lacks memory, other frames of the reserve
/// give theirs.
pub(crate) fn create_or_take(
    allocator: &Allocator,
    size: u32,
    granule: u64,
    options: PhysicalOptions,
) -> Result<Frame, DeviceError> {
    if let Some(frame) = allocator.state().shared().take_reserved(Some(size)) {
        return Ok(frame);
    }
    let driver = allocator.device().driver();
    loop {
        match driver.create_physical(u64::from(size) * granule, options) {
            Ok(physical) => return Ok(Frame::new(physical, size)),
            Err(error) if error.is_out_of_memory() => {
                let Some(frame) = allocator.state().shared().take_reserved(None) else { return Err(error) };
                driver.release_physical(frame.physical)?;
            }
            Err(error) => return Err(error),
        }
    }
}
