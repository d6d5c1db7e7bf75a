//! The driver calls of a remap, made without a lock, and what they came to.
//!
//! Creation comes first, because it is what fails for lack of memory, and nothing has to be undone then. What is unmapped
//! already when a later call fails becomes spare, and what is mapped but cannot be accessed is unmapped again.

use std::ops::Range;

use aquifer_device::{Device, DeviceError, DevicePtr, PhysicalOptions, RawPhysical};

use crate::hooks::Hooks;

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
    /// Granules mapped where they were wanted: usable, or not if the driver would neither give access nor take them back.
    pub(crate) mapped: Vec<(u64, RawPhysical, bool)>,
    /// Granules mapped nowhere.
    pub(crate) spares: Vec<RawPhysical>,
}

/// Does the work, as far as the driver does.
pub(crate) fn carry_out(device: &Device, hooks: &Hooks, mut work: Work) -> Done {
    let mut done = Done { spares: std::mem::take(&mut work.spares), ..Done::default() };
    let steps = create(device, &work, &mut done)
        .and_then(|()| unmap(device, hooks, &work.unmap, &mut done))
        .and_then(|()| map(device, hooks, &work, &mut done));
    done.error = steps.err();
    done.still_mapped = work.unmap.into_iter().skip(done.unmapped).map(|(_, granules)| granules).collect();
    done
}

fn create(device: &Device, work: &Work, done: &mut Done) -> Result<(), DeviceError> {
    if work.create > 0 {
        device.settle();
    }
    let mut created = Vec::new();
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
        let first = done.mapped.len();
        if let Err(error) = map_range(device, work, range, done) {
            unmap_again(device, work.granule, first, done);
            return Err(error);
        }
        hooks.mapped(range.start, range.end - range.start);
    }
    Ok(())
}

/// Maps a range and sets access to it once.
fn map_range(device: &Device, work: &Work, range: &Range<u64>, done: &mut Done) -> Result<(), DeviceError> {
    let step = usize::try_from(work.granule).unwrap_or(usize::MAX);
    for at in range.clone().step_by(step) {
        let Some(&physical) = done.spares.last() else { break };
        device.driver().map(DevicePtr(at), work.granule, physical)?;
        done.spares.pop();
        done.mapped.push((at, physical, true));
    }
    device.driver().set_access(DevicePtr(range.start), range.end - range.start, &work.access)
}

/// Takes mappings back that cannot be accessed.
fn unmap_again(device: &Device, granule: u64, first: usize, done: &mut Done) {
    for (at, physical, _) in done.mapped.split_off(first) {
        match device.driver().unmap(DevicePtr(at), granule) {
            Ok(()) => done.spares.push(physical),
            Err(error) => {
                tracing::warn!(%error, at, "a mapping without access could not be taken back; its addresses stay unused until it is");
                done.mapped.push((at, physical, false));
            }
        }
    }
}
