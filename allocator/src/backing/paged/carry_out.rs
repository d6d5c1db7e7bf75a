//! Carries out at the driver, without a lock, what was planned under all of them, and tells what came of it.
//!
//! Creation comes first, because it is what fails for lack of memory, and nothing has to be undone then. What is unmapped
//! already when a later call fails becomes spare, and what is mapped but cannot be accessed is unmapped again.

use std::ops::Range;

use aquifer_device::{Device, DeviceError, DevicePtr, PhysicalOptions, RawPhysical};

use crate::recovery::hooks::Hooks;

/// Up to so many granules are created without asking whether the device has them.
const CREATED_UNASKED: u64 = 32;

/// What the driver is asked to do.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) granule: u64,
    pub(crate) options: PhysicalOptions,
    /// Devices that get access: this one and its peers.
    pub(crate) access: Vec<u32>,
    /// Granules to create.
    pub(crate) create: u64,
    /// Mapped ranges to be unmapped, and what is mapped there.
    pub(crate) unmap: Vec<(Range<u64>, Vec<RawPhysical>)>,
    /// Granules at hand.
    pub(crate) spares: Vec<RawPhysical>,
    /// Ranges to be mapped.
    pub(crate) fill: Vec<Range<u64>>,
}

/// What came of it. Every granule of the work, and every one created, is in exactly one place.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// What stopped the work, if anything did.
    pub(crate) error: Option<DeviceError>,
    /// Whether creating a granule did.
    pub(crate) at_creation: bool,
    /// Granules created that were not given back.
    pub(crate) created: u64,
    /// How many of the ranges to be unmapped were, in order.
    pub(crate) unmapped: usize,
    /// Granules of the others, by range.
    pub(crate) still_mapped: Vec<Vec<RawPhysical>>,
    /// What was filled, range by range.
    pub(crate) filled: Vec<Filled>,
    /// Granules mapped nowhere.
    pub(crate) spares: Vec<RawPhysical>,
}

/// Granules mapped side by side where they were wanted.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) range: Range<u64>,
    /// By address.
    pub(crate) granules: Vec<RawPhysical>,
    /// `false` if the driver would neither give access nor take them back.
    pub(crate) usable: bool,
}

impl Filled {
    /// The places of granules of so many bytes, by address.
    pub(crate) fn places(&self, granule: u64) -> impl Iterator<Item = u64> + use<> {
        places(&self.range, granule)
    }
}

/// Does the work, as far as the driver does.
pub(crate) fn carry_out(device: &Device, hooks: &Hooks, mut work: Work) -> Done {
    let mut done = Done { spares: std::mem::take(&mut work.spares), ..Done::default() };
    let moving = work.unmap.iter().map(|(_, granules)| granules.len()).sum::<usize>();
    done.spares.reserve(moving + small(work.create));
    let steps = create(device, &work, &mut done)
        .and_then(|()| unmap(device, hooks, &work.unmap, &mut done))
        .and_then(|()| map(device, hooks, &work, &mut done));
    done.error = steps.err();
    done.still_mapped = work.unmap.into_iter().skip(done.unmapped).map(|(_, granules)| granules).collect();
    done
}

fn create(device: &Device, work: &Work, done: &mut Done) -> Result<(), DeviceError> {
    if work.create > 0 {
        device.settle_unused();
    }
    refuse_in_vain(device, work).inspect_err(|_| done.at_creation = true)?;
    let mut created = Vec::with_capacity(small(work.create));
    for _ in 0..work.create {
        match device.driver().create_physical(work.granule, work.options) {
            Ok(physical) => created.push(physical),
            Err(error) => {
                done.at_creation = true;
                // What came before does not help: it goes back, so that others may have it.
                created.retain(|&physical| device.driver().release_physical(physical).is_err());
                done.created = created.len() as u64;
                done.spares.append(&mut created);
                return Err(error);
            }
        }
    }
    done.created = work.create;
    done.spares.append(&mut created);
    Ok(())
}

/// Refuses to create many granules where the device cannot have that much: one after the other they would take all its memory from
/// everybody else, for as long as it takes to create them, and give it back. What the device says is free is not all: the driver's
/// own pool lets go of what it holds in reserve. So one piece of that size is asked for, which is had as a whole or not at all.
fn refuse_in_vain(device: &Device, work: &Work) -> Result<(), DeviceError> {
    let bytes = work.create.saturating_mul(work.granule);
    let seems_lacking = || device.driver().memory_info().is_ok_and(|memory| memory.free < bytes);
    if work.create <= CREATED_UNASKED || !seems_lacking() {
        return Ok(());
    }
    let whole = device.driver().create_physical(bytes, work.options)?;
    if let Err(error) = device.driver().release_physical(whole) {
        tracing::debug!(%error, "memory that was asked for in one piece goes back later");
        device.release_later(whole);
    }
    Ok(())
}

fn unmap(
    device: &Device,
    hooks: &Hooks,
    ranges: &[(Range<u64>, Vec<RawPhysical>)],
    done: &mut Done,
) -> Result<(), DeviceError> {
    for (range, granules) in ranges {
        unmap_range(device, hooks, range)?;
        done.unmapped += 1;
        done.spares.extend(granules);
    }
    Ok(())
}

/// Unmaps a range that is done with, and tells the observers: before, and again if the memory stays after all.
pub(crate) fn unmap_range(device: &Device, hooks: &Hooks, range: &Range<u64>) -> Result<(), DeviceError> {
    let bytes = range.end - range.start;
    hooks.about_to_unmap(range.start, bytes);
    device.driver().unmap(DevicePtr(range.start), bytes).inspect_err(|_| hooks.mapped(range.start, bytes))
}

fn map(device: &Device, hooks: &Hooks, work: &Work, done: &mut Done) -> Result<(), DeviceError> {
    for range in &work.fill {
        let mut granules = Vec::with_capacity(small((range.end - range.start) / work.granule));
        if let Err(error) = map_range(device, work, range, &mut done.spares, &mut granules) {
            unmap_again(device, work.granule, range.start, granules, done);
            return Err(error);
        }
        hooks.mapped(range.start, range.end - range.start);
        done.filled.push(Filled { range: range.clone(), granules, usable: true });
    }
    Ok(())
}

/// A number of granules, of which a device has fewer than the host has addresses.
fn small(granules: u64) -> usize {
    usize::try_from(granules).unwrap_or(0)
}

/// The places of a range, by address.
fn places(range: &Range<u64>, granule: u64) -> impl Iterator<Item = u64> + use<> {
    range.clone().step_by(usize::try_from(granule).unwrap_or(usize::MAX))
}

/// Maps a range and sets access to it once. What is mapped goes from one list to the other.
fn map_range(
    device: &Device,
    work: &Work,
    range: &Range<u64>,
    spares: &mut Vec<RawPhysical>,
    mapped: &mut Vec<RawPhysical>,
) -> Result<(), DeviceError> {
    for at in places(range, work.granule) {
        let Some(&physical) = spares.last() else { break };
        device.driver().map(DevicePtr(at), work.granule, physical)?;
        spares.pop();
        mapped.push(physical);
    }
    device.driver().set_access(DevicePtr(range.start), range.end - range.start, &work.access)
}

/// Takes mappings back, from `start` on, that cannot be accessed.
fn unmap_again(device: &Device, granule: u64, start: u64, mapped: Vec<RawPhysical>, done: &mut Done) {
    for (at, physical) in places(&(start..u64::MAX), granule).zip(mapped) {
        match device.driver().unmap(DevicePtr(at), granule) {
            Ok(()) => done.spares.push(physical),
            Err(error) => {
                tracing::warn!(%error, at, "a mapping without access could not be taken back; its addresses stay unused until it is");
                done.filled.push(Filled { range: at..at + granule, granules: vec![physical], usable: false });
            }
        }
    }
}
