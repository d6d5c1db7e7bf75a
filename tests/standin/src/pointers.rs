//! What an address means: where it lies, and what it is part of. As with CUDA, an address is known
//! whichever device's context is current, and what it is part of is all of its reservation, of
//! which nothing need be mapped (CUDA driver API, `cuPointerGetAttribute`).

use std::ffi::c_void;
use std::sync::Arc;

use aquifer_device::{Code, DevicePtr};

use crate::abi::{Answer, Handle, Out, abi, array, needed, offer};
use crate::process::{Life, Process};

/// The range that an address is part of.
struct Range {
    /// Whose memory it is.
    ordinal: u32,
    start: u64,
    bytes: u64,
    host: bool,
    /// The allocation or mapping that holds the address; `None` where addresses are reserved and
    /// nothing is mapped.
    memory: Option<(u64, u64)>,
}

/// A fact about an address, in the size that CUDA gives it.
enum Fact {
    Narrow(u32),
    Wide(u64),
}

impl Fact {
    /// # Safety
    /// `data` must be writable for a value of this attribute.
    unsafe fn write(self, data: *mut c_void) {
        match self {
            // SAFETY: the caller vouches for 4 bytes.
            Fact::Narrow(value) => unsafe { data.cast::<u32>().write(value) },
            // SAFETY: the caller vouches for 8 bytes.
            Fact::Wide(value) => unsafe { data.cast::<u64>().write(value) },
        }
    }
}

impl Life {
    /// The range of this device, or of its pinned memory, that an address is part of.
    fn own_range(&self, ptr: u64) -> Option<Range> {
        let of = |start, bytes, host| Range { ordinal: self.ordinal, start, bytes, host, memory: Some((start, bytes)) };
        let pinned = usize::try_from(ptr).ok().and_then(|address| self.pinned.holding(address));
        if let Some(block) = pinned {
            return Some(of(block.start as u64, block.bytes as u64, true));
        }
        if let Some(range) = self.sim.allocation_at(DevicePtr(ptr)) {
            return Some(of(range.start, range.end - range.start, false));
        }
        let reserved = self.sim.reservation_at(DevicePtr(ptr))?;
        let mapped = self.sim.mapping_at(DevicePtr(ptr)).map(|mapped| (mapped.ptr.0, mapped.bytes));
        Some(Range { memory: mapped, ..of(reserved.start, reserved.end - reserved.start, false) })
    }

    /// A fact about an address that is part of something; `None` about one that is not.
    fn fact(&self, attribute: u32, ptr: u64, range: Option<&Range>) -> Answer<Fact> {
        let host = range.map(|range| range.host);
        Ok(match attribute {
            1 => Fact::Wide(range.map_or(Ok(0), |range| context(self, range))?),
            2 => Fact::Narrow(host.map_or(0, |host| if host { 1 } else { 2 })),
            // Pinned memory has no address on the device here.
            3 => Fact::Wide(if host == Some(false) { ptr } else { 0 }),
            4 => Fact::Wide(if host == Some(true) { ptr } else { 0 }),
            8 => Fact::Narrow(0),
            9 => Fact::Narrow(range.map_or(-2_i32 as u32, |range| range.ordinal)),
            11 => Fact::Wide(range.map_or(0, |range| range.start)),
            12 => Fact::Wide(range.map_or(0, |range| range.bytes)),
            13 => Fact::Narrow(range.is_some_and(|range| range.memory.is_some()).into()),
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }
}

/// The context of memory: the current one, which shares all that its device has, or the primary one
/// of another device.
fn context(life: &Life, range: &Range) -> Answer<Handle> {
    let process = Process::get();
    if range.ordinal == life.ordinal {
        return process.current().map(|context| context.handle);
    }
    let device = i32::try_from(range.ordinal).ok().and_then(|ordinal| process.device(ordinal));
    device.map(|device| device.primary.context.handle).ok_or(Code::INVALID_VALUE)
}

/// The range that an address is part of, of whichever device.
fn range(life: &Arc<Life>, ptr: u64) -> Answer<Range> {
    let found = life.own_range(ptr).or_else(|| Process::get().others(life).find_map(|other| other.own_range(ptr)));
    found.ok_or(Code::INVALID_VALUE)
}

abi! {
    /// A fact about an address of the device or of pinned memory: context, kind of memory,
    /// addresses, whether it is managed, device, range, whether it is mapped.
    4000 cuPointerGetAttribute(call, data: *mut c_void, attribute: u32, ptr: u64) {
        let life = call.life()?;
        let range = range(&life, ptr)?;
        if data.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let wrong_side = matches!((attribute, range.host), (3, true) | (4, false));
        if wrong_side || (attribute == 3 && range.ordinal != life.ordinal) {
            return Err(Code::INVALID_VALUE);
        }
        let fact = life.fact(attribute, ptr, Some(&range))?;
        // SAFETY: not null, and the caller vouches for the attribute's size.
        unsafe { fact.write(data) };
        Ok(())
    }

    /// Several facts at once; those of an address that is part of nothing are zero.
    7000 cuPointerGetAttributes(
        call, count: u32, attributes: *const u32, data: *const *mut c_void, ptr: u64,
    ) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the array.
        let attributes = unsafe { array(attributes, count as usize) }?;
        // SAFETY: the caller vouches for the array.
        let data = unsafe { array(data, count as usize) }?;
        let range = range(&life, ptr).ok();
        for (&attribute, &data) in attributes.iter().zip(data) {
            let fact = life.fact(attribute, ptr, range.as_ref())?;
            if data.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            // SAFETY: not null, and the caller vouches for the attribute's size.
            unsafe { fact.write(data) };
        }
        Ok(())
    }

    /// The allocation or mapping that an address of the device is part of.
    3020 cuMemGetAddressRange_v2(call, start: Out<'_, u64>, bytes: Out<'_, usize>, ptr: u64) {
        let range = range(&call.life()?, ptr).ok().filter(|range| !range.host);
        let memory = range.and_then(|range| range.memory);
        let memory = needed(memory).map_err(|_| crate::abi::NOT_FOUND)?;
        offer(start, memory.0);
        offer(bytes, usize::try_from(memory.1).map_err(|_| Code::INVALID_VALUE)?);
        Ok(())
    }
}
