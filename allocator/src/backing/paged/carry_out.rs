//! Makes the driver calls of a remap, without a lock. The work was planned under all locks (`plan.rs`), and is accounted for under all
//! locks afterwards.
//!
//! Granules are created first, because that is the step which fails for lack of memory, and then nothing has to be undone. If a later call
//! fails, granules that are unmapped already become spare, and granules that are mapped but cannot be accessed are unmapped again.

use std::ops::Range;

use aquifer_device::{Device, DeviceError, DevicePtr, PhysicalOptions, RawPhysical};

use crate::recovery::hooks::Hooks;

/// Up to this many granules are created without checking first that the device has that much memory.
const CREATED_UNASKED: u64 = 32;

/// The driver's work.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) granule: u64,
    pub(crate) options: PhysicalOptions,
    /// Devices that get access: this one and its peers.
    pub(crate) access: Vec<u32>,
    /// Granules to create.
    pub(crate) create: u64,
    /// Mapped ranges to unmap, and the granules that are mapped there.
    pub(crate) unmap: Vec<(Range<u64>, Vec<RawPhysical>)>,
    /// Spare granules to map.
    pub(crate) spares: Vec<RawPhysical>,
    /// Ranges to map granules at.
    pub(crate) fill: Vec<Range<u64>>,
}

/// The result of the work. Every granule of the work, and every one created, is in exactly one of the lists.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// The error that stopped the work, if any.
    pub(crate) error: Option<DeviceError>,
    /// True if creating a granule failed.
    pub(crate) at_creation: bool,
    /// Number of granules that were created and not given back.
    pub(crate) created: u64,
    /// How many of the ranges to unmap were unmapped; they are the first ones.
    pub(crate) unmapped: usize,
    /// Granules of the other ranges to unmap, by range.
    pub(crate) still_mapped: Vec<Vec<RawPhysical>>,
    /// The ranges at which granules are mapped now.
    pub(crate) filled: Vec<Filled>,
    /// Granules that are mapped nowhere.
    pub(crate) spares: Vec<RawPhysical>,
}

/// Granules mapped side by side in a range to fill.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) range: Range<u64>,
    /// The granules, by address.
    pub(crate) granules: Vec<RawPhysical>,
    /// False if the driver neither gave access to them nor unmapped them again.
    pub(crate) usable: bool,
}

impl Filled {
    /// The addresses of the granules, which have `granule` bytes each.
    pub(crate) fn places(&self, granule: u64) -> impl Iterator<Item = u64> + use<> {
        places(&self.range, granule)
    }
}

/// Does the work until it is finished or a driver call fails.
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
                // The granules created so far do not help: they go back, so that others may have the memory.
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

/// Fails if many granules are to be created and the device has not that much memory. Otherwise granules created one by one would take all
/// its memory from everybody else for a while, only to give it back. Where the device reports too little free memory, that is not decisive,
/// because the driver's own pool gives up memory that it holds in reserve. So this then creates one piece of the whole size, which succeeds
/// as a whole or not at all, and releases it.
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

/// Unmaps a range. Observers are told before it, and told again that memory is mapped there if the call fails.
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

/// A number of granules as an index. It always fits: a device has fewer granules than the host has addresses.
fn small(granules: u64) -> usize {
    usize::try_from(granules).unwrap_or(0)
}

/// The addresses of the granules of a range.
fn places(range: &Range<u64>, granule: u64) -> impl Iterator<Item = u64> + use<> {
    range.clone().step_by(usize::try_from(granule).unwrap_or(usize::MAX))
}

/// Maps granules at a range, and gives access to all of it with one call. Mapped granules move from one list to the other.
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

/// Unmaps the granules mapped from `start` on, which cannot be accessed.
fn unmap_again(device: &Device, granule: u64, start: u64, mapped: Vec<RawPhysical>, done: &mut Done) {
    let mut failed: Option<(DeviceError, u64)> = None;
    for (at, physical) in places(&(start..u64::MAX), granule).zip(mapped) {
        match device.driver().unmap(DevicePtr(at), granule) {
            Ok(()) => done.spares.push(physical),
            Err(error) => {
                failed.get_or_insert((error, 0)).1 += 1;
                done.filled.push(Filled { range: at..at + granule, granules: vec![physical], usable: false });
            }
        }
    }
    // Of a lost device nothing is taken back, and an error has told of the loss.
    if let Some((error, mappings)) = failed.filter(|(error, _)| !error.is_device_lost()) {
        tracing::warn!(%error, mappings, "mappings without access could not be taken back; their addresses stay unused until they are");
    }
}
