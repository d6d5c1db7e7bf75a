//! Opening an allocator, and its reserve (`reserve_mb`): frames that are taken then, and stay held from
//! the device. They start spare, and serve as other frames do; memory on its way back to the device
//! becomes spare again while no more than the reserve would be left (`Core::releasable`).

use aquifer_device::Device;

use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::config::Config;
use crate::core::limits::Refusal;
use crate::core::paged::frames::{Frame, sizes};
use crate::error::AllocError;
use crate::recovery::oom::{Tried, out_of_memory};
use crate::tags::Tag;
use crate::types::{PoolId, Request, StreamId};

impl Allocator {
    /// An allocator for `device`, configured by a [`Config`], or by options as text, such as
    /// `"limit_mb:4096"`. The rest of the process does not share it;
    /// [`Allocator::of`] gives one that it does.
    ///
    /// # Errors
    /// When the configuration contradicts itself, the driver cannot tell the device's memory, or that
    /// has no room for the reserve ([`Config::reserve`]).
    pub fn new(
        device: &Device,
        config: impl TryInto<Config, Error: Into<AllocError>>,
    ) -> Result<Allocator, AllocError> {
        let allocator = Allocator::without_reserve(device, config.try_into().map_err(Into::into)?)?;
        take_reserve(&allocator)?;
        Ok(allocator)
    }
}

/// Takes the reserve that the configuration asks for, or nothing.
fn take_reserve(allocator: &Allocator) -> Result<(), AllocError> {
    let reserve = allocator.config().reserve;
    if reserve == 0 {
        return Ok(());
    }
    let mut shared = allocator.state().shared();
    let Some(granule) = shared.granule() else {
        return Err(allocator.not_mapped("a reserve (`reserve_mb`)"));
    };
    shared.set_reserve(reserve.checked_next_multiple_of(granule).unwrap_or(reserve));
    drop(shared);
    let Some(refusal) = fill(allocator)? else { return Ok(()) };
    allocator.state().shared().set_reserve(0);
    let stream = StreamId::of(allocator.device().default_stream());
    let (pool, size) = (PoolId::LARGE, reserve);
    let request = Request { requested: size, size, pool, stream, tag: Tag::default(), is_regular: true };
    let tried = Tried { refusal: Some(refusal), reserve: true, ..Tried::for_dedicated(0) };
    Err(out_of_memory(allocator, &request, tried))
}

/// Creates the frames of the reserve, or none where something refuses that.
fn fill(allocator: &Allocator) -> Result<Option<Refusal>, AllocError> {
    let room = room(allocator)?;
    let mut shared = allocator.state().shared();
    let paged = shared.paged();
    let (granule, options) = (paged.granule, paged.options);
    let largest = paged.frame.unwrap_or(paged.weights.slot_most()) / granule;
    let largest = u32::try_from(largest.max(1)).unwrap_or(u32::MAX);
    let bytes = shared.reserve();
    match buyable(allocator, &shared, &room) {
        (most, refusal) if bytes > most => return Ok(Some(refusal)),
        _ if bytes > allocator.device().info().total_bytes => return Ok(Some(Refusal::Device)),
        _ => shared.begin_growing(bytes),
    }
    drop(shared);
    let driver = allocator.device().driver();
    let (mut frames, mut failed) = (Vec::new(), None);
    for size in sizes(bytes / granule, largest) {
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
