//! The table of mapped memory: which frame is mapped at which address. Physical memory comes in
//! frames and is counted in granules (`frames.rs`); physical memory and addresses are separate
//! resources, and this table connects them.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use aquifer_device::{DevicePtr, PhysicalOptions, RawPhysical, Reservation};

use crate::core::paged::deferred_release::DeferredReleases;
use crate::core::paged::frames::{Frame, LooseFrames, OldMapping, granules_of};
use crate::core::paged::places::Places;
use crate::core::paged::{Capacity, Pins};
use crate::core::policy::Weights;
use crate::core::sleep::{Sleep, united, within};
use crate::size_class::PoolKind;
use crate::tags::Tag;
use crate::types::{BlockId, PoolId, StreamId};

/// The state of mapped memory.
#[derive(Debug)]
pub(crate) struct Paged {
    /// Bytes of a granule: a power of two and a multiple of the device's granularity.
    pub(crate) granule: u64,
    pub(crate) weights: &'static Weights,
    /// Bytes of slots and frames, if the configuration says so.
    pub(crate) frame: Option<u64>,
    /// Properties that frames are created with.
    pub(crate) options: PhysicalOptions,
    /// True if the driver maps a frame at several addresses at once.
    pub(crate) may_alias: bool,
    /// Ordinals of the devices that have access to every mapping: this one first, then its peers.
    pub(crate) access: Vec<u32>,
    /// Reservations, by their first address.
    reservations: BTreeMap<u64, Mapped>,
    /// Owners of reservations outside of heaps, by the first address.
    pub(crate) owned: BTreeMap<u64, Owned>,
    /// Bytes that they have.
    pub(crate) owned_bytes: u64,
    /// Memory that such owners gave up.
    pub(crate) deferred_release: DeferredReleases,
    pub(crate) sleep: Sleep,
    /// Frames that are mapped nowhere.
    pub(crate) spares: LooseFrames,
    /// Mappings that cannot be used and that the driver has not unmapped so far.
    pub(crate) stuck: VecDeque<Stuck>,
    /// Addresses at which frames are mapped that moved elsewhere.
    pub(crate) old_mappings: Vec<OldMapping>,
    /// Granules of spare frames that operations are working with.
    pub(crate) in_flight: u64,
    /// Bytes mapped for small and for large pools.
    pub(crate) mapped_bytes: [u64; 2],
    /// The same as counted in the statistics so far, where spare granules count as large.
    pub(crate) accounted: [u64; 2],
    /// The peak of use (`policy.rs`), as far as plans have seen it.
    pub(crate) peak: u64,
    /// Frames that moved while there was room, since memory last went back.
    pub(crate) moves: u64,
    /// How much the device can give.
    pub(crate) capacity: Capacity,
}

/// Purpose of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A region of a heap.
    Heap,
    /// A [`crate::Growable`].
    Growable,
    /// A [`crate::Exportable`]. Its physical memory is of no use to others.
    Exportable,
}

/// Addresses that stay held because frames are mapped there without access and the driver did not
/// unmap them.
#[derive(Debug)]
pub(crate) struct Stuck {
    pub(crate) block: BlockId,
    /// Addresses of the frames that are mapped.
    pub(crate) frames: Vec<Range<u64>>,
}

impl Stuck {
    pub(crate) fn bytes(&self) -> u64 {
        self.frames.iter().map(|frame| frame.end - frame.start).sum()
    }
}

/// Memory of a reservation that may sleep.
#[derive(Debug)]
pub(crate) struct MaySleep {
    /// First address of the reservation.
    pub(crate) base: u64,
    pub(crate) range: Range<u64>,
    pub(crate) kind: PoolKind,
    pub(crate) is_dedicated: bool,
}

/// A reservation, and what is mapped at its places.
#[derive(Debug)]
struct Mapped {
    bytes: u64,
    purpose: Purpose,
    /// The kind of pool that its memory counts in.
    kind: PoolKind,
    /// Bytes of each of its places.
    granule: u64,
    places: Places,
}

impl Mapped {
    /// The indices of the places that a range touches. The range is relative to the reservation.
    fn touched(&self, range: Range<u64>) -> Range<usize> {
        let number = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        number(range.start / self.granule)..number(range.end.div_ceil(self.granule))
    }
}

/// Of an allocator that maps nothing.
impl Default for Paged {
    fn default() -> Paged {
        Paged { access: Vec::new(), ..Paged::new(Weights::TIME, 1, None, Ability::default(), 0) }
    }
}

impl Paged {
    /// No memory yet. `frame` is the size of slots and frames, if the configuration says so.
    pub(crate) fn new(
        weights: &'static Weights,
        granule: u64,
        frame: Option<u64>,
        ability: Ability,
        ordinal: u32,
    ) -> Paged {
        debug_assert!(granule.is_power_of_two());
        let (reservations, spares) = (BTreeMap::new(), LooseFrames::default());
        Paged {
            weights,
            granule,
            frame,
            options: ability.options,
            may_alias: ability.may_alias,
            access: vec![ordinal],
            reservations,
            owned: BTreeMap::new(),
            owned_bytes: 0,
            deferred_release: DeferredReleases::new(granule),
            sleep: Sleep::default(),
            spares,
            stuck: VecDeque::new(),
            old_mappings: Vec::new(),
            in_flight: 0,
            mapped_bytes: [0; 2],
            accounted: [0; 2],
            peak: 0,
            moves: 0,
            capacity: Capacity::default(),
        }
    }

    pub(crate) fn add_reservation(&mut self, addr: u64, bytes: u64, kind: PoolKind, purpose: Purpose) {
        // Exportable memory is one place, however large, so that there is one handle to export.
        let granule = if purpose == Purpose::Exportable { bytes } else { self.granule };
        let places = Places::new(usize::try_from(bytes / granule).unwrap_or(0));
        self.reservations.insert(addr, Mapped { bytes, purpose, kind, granule, places });
    }

    /// Forgets a reservation, and returns its length in bytes.
    pub(crate) fn remove_reservation(&mut self, addr: u64) -> u64 {
        let Some(Mapped { bytes, places, .. }) = self.reservations.remove(&addr) else { return 0 };
        debug_assert!(places.all().next().is_none());
        bytes
    }

    /// Purpose of the reservation that starts at `addr`.
    pub(crate) fn purpose_of(&self, addr: u64) -> Option<Purpose> {
        self.reservations.get(&addr).map(|mapped| mapped.purpose)
    }

    /// Bytes of the frames that are held and accounted for. Exported memory is none.
    pub(crate) fn frame_bytes(&self) -> u64 {
        let exported = self.reservations.values().filter(|one| one.purpose == Purpose::Exportable);
        let exported = exported.filter(|one| one.places.all().next().is_some()).map(|one| one.bytes).sum::<u64>();
        self.accounted.iter().sum::<u64>().saturating_sub(exported)
    }

    /// Bytes held from the device that are not behind usable addresses.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let stuck: u64 = self.stuck.iter().map(Stuck::bytes).sum();
        let unmoved: u64 = self.old_mappings.iter().map(|old| granules_of(&old.unmoved)).sum();
        (self.spares.granules() + self.in_flight + unmoved) * self.granule + stuck
    }

    /// Number of reservations.
    pub(crate) fn reservations(&self) -> u64 {
        self.reservations.len() as u64
    }

    /// Bytes of reserved addresses.
    pub(crate) fn address_bytes(&self) -> u64 {
        self.reservations.values().map(|mapped| mapped.bytes).sum()
    }

    /// Bytes of reserved addresses outside of heaps.
    pub(crate) fn dedicated_address_bytes(&self) -> u64 {
        let dedicated = self.reservations.values().filter(|mapped| mapped.purpose != Purpose::Heap);
        dedicated.map(|mapped| mapped.bytes).sum()
    }

    /// The reservation that a range lies in, and the places that it touches there.
    fn touched(&self, range: &Range<u64>) -> Option<(&Mapped, Range<usize>)> {
        let (&base, mapped) = self.reservations.range(..=range.start).next_back()?;
        Some((mapped, mapped.touched(range.start - base..range.end - base)))
    }

    /// As [`Paged::touched`], to change the reservation.
    fn touched_mut(&mut self, range: &Range<u64>) -> Option<(&mut Mapped, Range<usize>)> {
        let (&base, mapped) = self.reservations.range_mut(..=range.start).next_back()?;
        let touched = mapped.touched(range.start - base..range.end - base);
        Some((mapped, touched))
    }

    /// Bytes mapped in the reservation that an address lies in.
    pub(crate) fn mapped_around(&self, addr: u64) -> u64 {
        self.touched(&(addr..addr)).map_or(0, |(mapped, _)| mapped.places.filled() as u64 * mapped.granule)
    }

    /// Notes that frames are mapped side by side from `addr` on.
    pub(crate) fn put_all(&mut self, addr: u64, frames: &[Frame]) {
        if let Some((mapped, touched)) = self.touched_mut(&(addr..addr)) {
            mapped.places.put(touched.start, frames);
        }
    }

    /// Removes the frames of a mapped range, which consists of whole ones, from the table, and
    /// returns them by address.
    pub(crate) fn forget_mapped(&mut self, addr: u64, bytes: u64) -> Vec<Frame> {
        let Some((mapped, touched)) = self.touched_mut(&(addr..addr + bytes)) else { return Vec::new() };
        let taken = mapped.places.forget(touched);
        debug_assert_eq!(granules_of(&taken) * mapped.granule, bytes);
        taken
    }

    /// The addresses of the frame that the memory at an address, in some reservation, belongs to.
    pub(crate) fn frame_at(&self, addr: u64) -> Option<Range<u64>> {
        let (&base, mapped) = self.reservations.range(..=addr).next_back()?;
        let frame = mapped.places.frame_around(usize::try_from((addr - base) / mapped.granule).ok()?)?;
        let addr = |place: usize| base + place as u64 * mapped.granule;
        Some(addr(frame.start)..addr(frame.end))
    }

    /// Bytes of the frames that a range touches and of which any part is pinned.
    pub(crate) fn pinned_bytes(&self, pins: &Pins, range: Range<u64>) -> u64 {
        let (mut bytes, mut seen_to) = (0, 0);
        for addr in pins.within(range) {
            if let Some(frame) = self.frame_at(addr).filter(|frame| frame.start >= seen_to) {
                bytes += frame.end - frame.start;
                seen_to = frame.end;
            }
        }
        bytes
    }

    /// The frames that lie wholly within a range of the reservation that starts at `base`. All of
    /// the range has memory.
    pub(crate) fn whole_frames(&self, base: u64, range: &Range<u64>) -> WholeFrames<'_> {
        let inside = self.places_inside(base, range);
        let (places, left) =
            inside.map_or((None, 0..0), |(places, inside)| (Some(places), places.whole_frames(inside)));
        WholeFrames { base, granule: self.granule, left, places }
    }

    /// The places that lie wholly within a range of the reservation that starts at `base`. `None`
    /// if there are none.
    fn places_inside(&self, base: u64, range: &Range<u64>) -> Option<(&Places, Range<usize>)> {
        let number = |bytes: u64| usize::try_from(bytes >> self.granule.trailing_zeros()).unwrap_or(usize::MAX);
        let inside = number(range.start - base + (self.granule - 1))..number(range.end - base);
        if inside.is_empty() {
            return None;
        }
        Some((&self.reservations.get(&base)?.places, inside))
    }

    /// The contiguous ranges that have memory, by address. Ranges of two reservations that lie side
    /// by side are listed separately, because a mapping operation concerns one reservation.
    pub(crate) fn mapped_ranges(&self) -> Vec<Range<u64>> {
        let all = |(&base, mapped): (&u64, &Mapped)| base..base + mapped.bytes;
        self.reservations.iter().flat_map(|entry| self.mapped_within(&all(entry))).collect()
    }

    /// The contiguous parts of a range, within a reservation, that have memory.
    pub(crate) fn mapped_within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.runs(range, |has_memory| has_memory)
    }

    /// The same, and those that have none only until the allocator wakes up.
    pub(crate) fn held_within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let sleeping = within(self.sleep.addresses(), range).into_iter().flat_map(|part| self.unmapped_within(&part));
        self.mapped_within(range).into_iter().chain(sleeping).collect()
    }

    /// The contiguous parts of a range, within a reservation, that have no memory.
    pub(crate) fn unmapped_within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.runs(range, |has_memory| !has_memory)
    }

    /// The frames that may sleep, by address, each with its reservation. Pinned frames stay, and
    /// exportable memory, and what is mapped at several addresses.
    pub(crate) fn may_sleep<'a>(&'a self, pins: &'a Pins) -> impl Iterator<Item = MaySleep> + 'a {
        let is_unusable = |frame: &MaySleep| self.is_unusable(frame.base, frame.range.start);
        let stays = move |frame: &MaySleep| pins.are_in(frame.range.clone()) || self.has_old_mapping(&frame.range);
        self.frames().filter(move |frame| !stays(frame) && !is_unusable(frame))
    }

    /// True if a frame may be mapped at other addresses, too.
    pub(crate) fn has_old_mapping(&self, frame: &Range<u64>) -> bool {
        self.old_mappings.iter().any(|one| one.window.start < frame.end && frame.start < one.window.end)
    }

    /// The frames that are mapped, by address, each with its reservation, without exportable
    /// memory.
    pub(crate) fn frames(&self) -> impl Iterator<Item = MaySleep> + '_ {
        let reservations = self.reservations.iter().filter(|(_, mapped)| mapped.purpose != Purpose::Exportable);
        reservations.flat_map(|(&base, mapped)| {
            mapped.places.all().map(move |(place, frame)| {
                let start = base + place as u64 * mapped.granule;
                let range = start..start + frame.granules() * mapped.granule;
                MaySleep { base, range, kind: mapped.kind, is_dedicated: mapped.purpose != Purpose::Heap }
            })
        })
    }

    /// True if the frame mapped at an address of a reservation never became usable, and the driver
    /// has not unmapped it so far.
    fn is_unusable(&self, base: u64, at: u64) -> bool {
        let is_stuck = |stuck: &Stuck| stuck.frames.iter().any(|frame| frame.contains(&at));
        self.stuck.iter().any(is_stuck) || self.deferred_release.is_unusable(base, at)
    }

    fn runs(&self, range: &Range<u64>, pick: impl Fn(bool) -> bool) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let Some((reserved, touched)) = self.touched(range) else { return Vec::new() };
        let step = usize::try_from(reserved.granule).unwrap_or(usize::MAX);
        let places = (range.start..).step_by(step).zip(reserved.places.have_memory(touched));
        let picked = places.filter(|&(_, has_memory)| pick(has_memory));
        united(picked.map(|(at, _)| at..at + reserved.granule).collect())
    }

    /// Bytes outside of heaps that their owners gave up.
    pub(crate) fn given_up_bytes(&self) -> u64 {
        let awake = self.dedicated().filter(|(range, _)| !self.sleep.has(range));
        awake.map(|(range, owned)| range.end - range.start - owned.size).sum()
    }

    /// The contiguous ranges of memory outside of heaps. Each comes with its owner's record, whose
    /// `size` is the part that the owner has, from the first address on. Memory counts even while
    /// it sleeps.
    pub(crate) fn dedicated(&self) -> impl Iterator<Item = (Range<u64>, Owned)> + '_ {
        self.owned.iter().flat_map(|(&base, owned)| {
            let end = base + self.reservations.get(&base).map_or(0, |mapped| mapped.bytes);
            let mut ranges = vec![(base..base + owned.size, *owned)];
            let mut held = self.held_within(&(base + owned.size..end));
            held.sort_unstable_by_key(|range| range.start);
            for beyond in held {
                match ranges.last_mut() {
                    Some((last, _)) if last.end == beyond.start => last.end = beyond.end,
                    _ => ranges.push((beyond, Owned { size: 0, ..*owned })),
                }
            }
            ranges.into_iter().filter(|(range, _)| !range.is_empty())
        })
    }

    /// All addresses with what is mapped there, and all memory that is mapped nowhere, for the
    /// device object to give back.
    pub(crate) fn into_memory(mut self) -> (Vec<Reservation>, Vec<RawPhysical>) {
        let mut loose = Vec::new();
        for sleeping in self.sleep.take_ranges() {
            let (mapped, others) = sleeping.frames.split_at(sleeping.mapped);
            self.put_all(sleeping.range.start, mapped);
            loose.extend(others.iter().map(|frame| frame.physical));
        }
        let mut reservations = Vec::with_capacity(self.reservations.len());
        for (addr, reserved) in self.reservations {
            let mapped = reserved.places.all().map(|(place, frame)| {
                let ptr = DevicePtr(addr + place as u64 * reserved.granule);
                (ptr, frame.granules() * reserved.granule, Some(frame.physical))
            });
            let within = |range: &Range<u64>| addr <= range.start && range.start < addr + reserved.bytes;
            let old = self.old_mappings.iter().map(|old| old.range.clone()).filter(within);
            let old = old.map(|range| (DevicePtr(range.start), range.end - range.start, None));
            let mapped = mapped.chain(old).collect();
            reservations.push(Reservation { ptr: DevicePtr(addr), bytes: reserved.bytes, mapped });
        }
        let unmoved = self.old_mappings.iter().flat_map(|old| old.unmoved.iter().copied());
        loose.extend(self.spares.iter().chain(unmoved).map(|frame| frame.physical));
        (reservations, loose)
    }
}

/// The frames that lie wholly within a range, from the high end down.
#[derive(Debug)]
pub(crate) struct WholeFrames<'a> {
    base: u64,
    granule: u64,
    /// The places of those that are left.
    left: Range<usize>,
    places: Option<&'a Places>,
}

impl WholeFrames<'_> {
    /// The addresses from the lowest of the frames that are left to the end of the highest.
    pub(crate) fn range(&self) -> Range<u64> {
        self.addresses(&self.left)
    }

    fn addresses(&self, places: &Range<usize>) -> Range<u64> {
        let addr = |place: usize| self.base + place as u64 * self.granule;
        addr(places.start)..addr(places.end)
    }
}

impl Iterator for WholeFrames<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.left.is_empty() {
            return None;
        }
        let start = self.places?.border_to(self.left.end - 1);
        let frame = start..self.left.end;
        self.left.end = start;
        Some(self.addresses(&frame))
    }
}

/// The pool that dedicated memory counts in: the default large one.
pub(crate) const POOL: PoolId = PoolId::LARGE;

/// The part of a reservation that its owner has, from the first address on. All sizes are 0 while
/// the owner has nothing yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owned {
    /// Bytes, a multiple of a granule.
    pub(crate) size: u64,
    /// Requested bytes.
    pub(crate) requested: u64,
    /// The stream that it was made for.
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
}

/// How memory is mapped on a device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ability {
    /// How granules are created.
    pub(crate) options: PhysicalOptions,
    /// True if a granule can be mapped at a second address while it is mapped at the first. False
    /// if that is not known.
    pub(crate) may_alias: bool,
}

#[cfg(test)]
mod tests {
    use aquifer_device::RawPhysical;

    use super::*;

    #[test]
    fn only_whole_frames_of_a_range_may_move() {
        const G: u64 = 1 << 21;
        let ability = Ability { options: PhysicalOptions::default(), may_alias: true };
        let mut paged = Paged::new(Weights::TIME, G, None, ability, 0);
        let base = 64 * G;
        paged.add_reservation(base, 64 * G, PoolKind::Large, Purpose::Heap);
        let frames = [4, 4, 2, 1].map(|granules| Frame::new(RawPhysical(1), granules));
        paged.put_all(base, &frames);
        // A range in granules, and its whole frames.
        let cases = [(0..11, 0..11), (1..9, 4..8), (4..9, 4..8), (1..3, 3..3), (1..6, 4..4), (9..9, 9..9)];
        for (range, whole) in cases {
            let range = base + range.start * G..base + range.end * G;
            let found = paged.whole_frames(base, &range).range();
            assert_eq!(found.end - found.start, (whole.end - whole.start) * G, "{range:?}");
            assert!(found.is_empty() || found.start == base + whole.start * G);
            // Bytes that are less than a granule are in none.
            assert_eq!(paged.whole_frames(base, &(range.start..range.end + 512)).range(), found);
        }
        let sizes = paged.whole_frames(base, &(base..base + 11 * G)).map(|frame| (frame.end - frame.start) / G);
        assert_eq!(sizes.collect::<Vec<_>>(), [1, 2, 4, 4], "from the high end down");
    }
}
