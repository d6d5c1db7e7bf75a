//! Fills with a pattern of 1, 2 or 4 bytes.

use std::sync::Arc;

use aquifer_device::{AccessKind, AccessRange, Code, DevicePtr, Driver as _, Launch, RawStream};

use crate::abi::{Answer, Handle, abi, code};
use crate::process::Life;

const LEGACY: Handle = RawStream::LEGACY.0;

/// How much of a pattern is written at a time, in bytes.
const CHUNK: usize = 64 << 10;

impl Life {
    /// Fills `count` times with a pattern. What is not the same byte throughout is a kernel of the
    /// simulated device.
    fn fill(&self, ptr: u64, pattern: &'static str, value: &[u8], count: usize, stream: Handle) -> Answer {
        let bytes = count.checked_mul(value.len()).ok_or(Code::INVALID_VALUE)? as u64;
        if !ptr.is_multiple_of(value.len() as u64) {
            return Err(Code::INVALID_VALUE);
        }
        let same = value.iter().all(|byte| *byte == value[0]);
        if same || bytes == 0 {
            return self.sim.memset(DevicePtr(ptr), value[0], bytes, RawStream(stream)).map_err(code);
        }
        let chunk: Vec<u8> = value.iter().copied().cycle().take(CHUNK).collect();
        let launch = Launch {
            name: pattern,
            accesses: vec![AccessRange { ptr: DevicePtr(ptr), bytes, kind: AccessKind::Write }],
            host: Some(Arc::new(move |memory, _| {
                (0..bytes).step_by(CHUNK).try_for_each(|at| {
                    let length = usize::try_from(bytes - at).unwrap_or(CHUNK).min(CHUNK);
                    memory.write(DevicePtr(ptr + at), &chunk[..length])
                })
            })),
            ..Launch::default()
        };
        // SAFETY: the kernel writes exactly the range that it declares, and takes no arguments.
        unsafe { self.sim.launch(&launch, RawStream(stream)) }.map_err(code)
    }
}

abi! {
    /// Enqueues a fill with a byte.
    3020 cuMemsetD8Async(call, ptr: u64, value: u8, count: usize, stream: Handle) {
        call.life()?.fill(ptr, "memset_d8", &[value], count, stream)
    }

    /// Enqueues a fill with 2 bytes.
    3020 cuMemsetD16Async(call, ptr: u64, value: u16, count: usize, stream: Handle) {
        call.life()?.fill(ptr, "memset_d16", &value.to_ne_bytes(), count, stream)
    }

    /// Enqueues a fill with 4 bytes.
    3020 cuMemsetD32Async(call, ptr: u64, value: u32, count: usize, stream: Handle) {
        call.life()?.fill(ptr, "memset_d32", &value.to_ne_bytes(), count, stream)
    }

    /// As `cuMemsetD8Async` on the legacy stream. As with CUDA, the host does not wait.
    3020 cuMemsetD8_v2(call, ptr: u64, value: u8, count: usize) {
        call.life()?.fill(ptr, "memset_d8", &[value], count, LEGACY)
    }

    /// As `cuMemsetD16Async` on the legacy stream.
    3020 cuMemsetD16_v2(call, ptr: u64, value: u16, count: usize) {
        call.life()?.fill(ptr, "memset_d16", &value.to_ne_bytes(), count, LEGACY)
    }

    /// As `cuMemsetD32Async` on the legacy stream.
    3020 cuMemsetD32_v2(call, ptr: u64, value: u32, count: usize) {
        call.life()?.fill(ptr, "memset_d32", &value.to_ne_bytes(), count, LEGACY)
    }
}
