//! What an address means: where it lies, and what it is part of.

use std::ffi::c_void;

use aquifer_device::{Code, DevicePtr};

use crate::abi::{Answer, Out, abi, array, needed, offer};
use crate::process::{Life, Process};

/// The range that an address is part of.
struct Range {
    start: u64,
    bytes: u64,
    host: bool,
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
    fn range(&self, ptr: u64) -> Answer<Range> {
        let pinned = usize::try_from(ptr).ok().and_then(|address| self.pinned.holding(address));
        if let Some(block) = pinned {
            return Ok(Range { start: block.start as u64, bytes: block.bytes as u64, host: true });
        }
        if let Some(range) = self.sim.allocation_at(DevicePtr(ptr)) {
            return Ok(Range { start: range.start, bytes: range.end - range.start, host: false });
        }
        let mapped = self.sim.mapping_at(DevicePtr(ptr)).ok_or(Code::INVALID_VALUE)?;
        Ok(Range { start: mapped.ptr.0, bytes: mapped.bytes, host: false })
    }

    /// A fact about an address that is part of something; `None` about one that is not.
    fn fact(&self, attribute: u32, ptr: u64, range: Option<&Range>) -> Answer<Fact> {
        let host = range.map(|range| range.host);
        let current = || Process::get().current().map(|context| context.handle);
        Ok(match attribute {
            1 => Fact::Wide(if host.is_some() { current()? } else { 0 }),
            2 => Fact::Narrow(host.map_or(0, |host| if host { 1 } else { 2 })),
            // Page-locked memory has no address on the device here.
            3 => Fact::Wide(if host == Some(false) { ptr } else { 0 }),
            4 => Fact::Wide(if host == Some(true) { ptr } else { 0 }),
            8 => Fact::Narrow(0),
            9 => Fact::Narrow(if host.is_some() { self.ordinal } else { -2_i32 as u32 }),
            11 => Fact::Wide(range.map_or(0, |range| range.start)),
            12 => Fact::Wide(range.map_or(0, |range| range.bytes)),
            13 => Fact::Narrow(host.is_some().into()),
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }
}

abi! {
    /// A fact about an address of the device or of page-locked memory: context, kind of memory, addresses, whether it is
    /// managed, device, range, whether it is mapped.
    4000 cuPointerGetAttribute(call, data: *mut c_void, attribute: u32, ptr: u64) {
        let life = call.life()?;
        let range = life.range(ptr)?;
        if data.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let wrong_side = matches!((attribute, range.host), (3, true) | (4, false));
        if wrong_side {
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
        let range = life.range(ptr).ok();
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
        let range = call.life()?.range(ptr).ok().filter(|range| !range.host);
        let range = needed(range).map_err(|_| crate::abi::NOT_FOUND)?;
        offer(start, range.start);
        offer(bytes, usize::try_from(range.bytes).map_err(|_| Code::INVALID_VALUE)?);
        Ok(())
    }
}
