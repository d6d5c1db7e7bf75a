//! Turns: the scopes that order work of different streams on the same memory.

use aquifer_device::{AccessKind, Stream, Tick};

use crate::buffer::held::LockedUses;
use crate::buffer::storage::Storage;
use crate::error::AllocError;
use crate::state::awake::KeptAwake;

/// A stream's turn with some memory: the scope in which the stream enqueues work that uses the
/// memory.
///
/// Taking a turn orders the stream's later work after all work that must come before it: work that
/// reads comes after the last work that wrote; work that writes comes after all work. While a turn
/// is held, no other thread gets a turn with the same memory. When it is dropped, the work enqueued
/// on the stream until then is noted, so that later turns come after it and the memory is not
/// reused before it is done.
///
/// This order costs at most one event and one wait for each stream that must be waited for, and
/// nothing where the streams are ordered already. Parts of one buffer count as the whole buffer.
///
/// Hold a turn only while enqueuing, and only one at a time on a thread. A second turn with the
/// same memory is refused ([`AllocError::TurnHeld`]), and two threads that each take several turns,
/// one after the other, can deadlock. One turn with all the memory cannot; where several streams
/// work together, also of several devices, [`Turn::of_streams`] takes it for all of them.
///
/// Turns do not see work that bypasses them, such as [`Stream::fill`] with a bare address, except
/// on streams that the memory was made ready for ([`Storage::ready_on`]). Inside a capture, a
/// stream can take turns with memory that it is ordered after already; note what a launched graph
/// does by a turn around the launch.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, Buffer, Turn};
/// use aquifer_device::{AccessKind, Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let buffer: Buffer<u8> = allocator.alloc(1 << 20, &one)?;
/// {
///     let _turn = Turn::take(&one, &[(buffer.storage(), AccessKind::Write)])?;
///     one.fill(buffer.ptr(), 7, buffer.bytes())?;
/// }
/// let mut bytes = vec![0; 1 << 20];
/// {
///     let _turn = Turn::take(&two, &[(buffer.storage(), AccessKind::Read)])?;
///     two.download_blocking(&mut bytes, buffer.ptr())?;
/// }
/// assert!(bytes.iter().all(|&byte| byte == 7));
/// device.assert_no_violations();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub struct Turn<'a> {
    held: Vec<(LockedUses<'a>, AccessKind, &'a Stream)>,
    /// Dropped after the turn has noted the work.
    _awake: Vec<KeptAwake>,
}

impl<'a> Turn<'a> {
    /// Waits until no thread has a turn with any of the memory, or a [`crate::Claim`] that
    /// conflicts. Then orders the stream's later work. The same memory may be listed several times.
    ///
    /// # Errors
    /// When memory belongs to another device than the stream; [`AllocError::TurnHeld`] while this
    /// thread has a turn with some of the memory; [`AllocError::Asleep`] while its allocator sleeps
    /// or is about to; errors of the driver; when the stream captures and is not ordered already.
    /// No work is noted then.
    pub fn take(stream: &'a Stream, memory: &[(&'a Storage, AccessKind)]) -> Result<Turn<'a>, AllocError> {
        Turn::take_all(memory.iter().map(|&(storage, kind)| (stream, storage, kind)).collect())
    }

    /// As [`Turn::take`], for several streams, each with the memory that it uses: the streams of a
    /// copy between two devices, say. Streams that use the same memory need turns of their own, one
    /// after the other.
    ///
    /// # Errors
    /// As [`Turn::take`]; [`AllocError::TurnHeld`] also if the same memory is listed for different
    /// streams.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, Buffer, Turn};
    /// use aquifer_device::{AccessKind::{Read, Write}, Device, sim::{SimConfig, SimDriver}};
    /// let devices = [0, 1].map(|ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal))));
    /// let streams = [devices[0].stream()?, devices[1].stream()?];
    /// let from: Buffer<u8> = Allocator::new(&devices[0], Config::default())?.alloc(1 << 20, &streams[0])?;
    /// let to: Buffer<u8> = Allocator::new(&devices[1], Config::default())?.alloc(1 << 20, &streams[1])?;
    /// {
    ///     let _turn = Turn::take(&streams[0], &[(from.storage(), Write)])?;
    ///     streams[0].fill(from.ptr(), 7, from.bytes())?;
    /// }
    /// {
    ///     let _turn = Turn::of_streams(&[(&streams[0], from.storage(), Read), (&streams[1], to.storage(), Write)])?;
    ///     streams[1].wait_for(&streams[0].tick())?;
    ///     streams[1].copy_from_peer(to.ptr(), &devices[0], from.ptr(), to.bytes())?;
    ///     streams[0].wait_for(&streams[1].tick())?; // the copy reads what later work of this stream may write
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_streams(work: &[(&'a Stream, &'a Storage, AccessKind)]) -> Result<Turn<'a>, AllocError> {
        Turn::take_all(work.to_vec())
    }

    fn take_all(mut wanted: Vec<(&'a Stream, &'a Storage, AccessKind)>) -> Result<Turn<'a>, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        wanted.retain(|(_, storage, _)| storage.bytes() > 0);
        // By address, the same order for all turns, so that they do not wait for each other in a
        // circle; and writing before reading, so that removing duplicates keeps it.
        let place =
            |stream: &Stream, storage| (std::ptr::from_ref::<Storage>(storage), stream.device_id(), stream.id());
        wanted.sort_unstable_by_key(|&(stream, storage, kind)| (place(stream, storage), std::cmp::Reverse(kind)));
        wanted.dedup_by_key(|(stream, storage, _)| place(stream, storage));
        if let Some((stream, storage, _)) =
            wanted.iter().find(|(stream, storage, _)| storage.device_id() != stream.device_id())
        {
            return Err(AllocError::wrong_device("buffer", storage.device_id(), stream.device_id()));
        }
        let awake = KeptAwake::of_all(wanted.iter().map(|(_, storage, _)| storage.memory().state()))?;
        let mut turn = Turn { held: Vec::new(), _awake: awake };
        let mut held = hold_unclaimed(&wanted)?;
        for ((stream, storage, kind), uses) in wanted.iter().zip(&mut held) {
            uses.note_free(Some(stream));
            uses.order(storage.memory(), stream, *kind)?;
        }
        turn.held.extend(held.into_iter().zip(wanted).map(|(uses, (stream, _, kind))| (uses, kind, stream)));
        Ok(turn)
    }

    /// Takes a turn with memory that the caller has claimed.
    pub(crate) fn claimed(stream: &'a Stream, storage: &'a Storage, kind: AccessKind) -> Result<Turn<'a>, AllocError> {
        if storage.device_id() != stream.device_id() {
            return Err(AllocError::wrong_device("buffer", storage.device_id(), stream.device_id()));
        }
        let awake = KeptAwake::of_claim(storage.memory().state());
        let mut held = storage.hold()?;
        held.order(storage.memory(), stream, kind)?;
        Ok(Turn { held: vec![(held, kind, stream)], _awake: vec![awake] })
    }

    /// Notes that work of another device's stream reads `storage`, which the turn must be with,
    /// until `tick`: later turns that write come after it. This is for work that the turn's own
    /// stream could not be ordered after. The memory is not kept for it: the caller must hold a
    /// handle until the tick is done.
    #[doc(hidden)]
    pub fn note_reader(&mut self, storage: &Storage, tick: &Tick) {
        let held = self.held.iter_mut().filter(|(held, ..)| held.is_of(storage));
        held.for_each(|(held, ..)| held.note_reader(tick.clone()));
    }
}

/// Locks all storages, in the given order, once no claim conflicts. While it waits for the end of a
/// claim it holds no lock, because the threads that end claims may need any of them.
fn hold_unclaimed<'a>(wanted: &[(&Stream, &'a Storage, AccessKind)]) -> Result<Vec<LockedUses<'a>>, AllocError> {
    let mut held = Vec::with_capacity(wanted.len());
    while let Some((_, storage, kind)) = wanted.get(held.len()) {
        let mut next = storage.hold()?;
        if next.is_claimed_against(*kind) {
            held.clear();
            next.wait_unclaimed(*kind);
        } else {
            held.push(next);
        }
    }
    Ok(held)
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        for (held, kind, stream) in &mut self.held {
            held.note(stream, *kind);
        }
    }
}
