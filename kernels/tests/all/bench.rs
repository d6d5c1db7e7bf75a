//! A device with the kernels, and memory between guards.

use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use aquifer::buffer::Handle;
use aquifer::{Allocator, Buffer};
use aquifer_allocator::{AccessGuard, Config};
use aquifer_device::{AccessKind, Device, Stream};
use aquifer_kernels::{DType, Element, Kernels, Operand};
use half::{bf16, f16};
use proptest::prelude::*;

pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) allocator: Allocator,
    pub(crate) kernels: Kernels,
    pub(crate) stream: Stream,
    /// Held while the shared device is in use; dropped last.
    _access: Option<MutexGuard<'static, ()>>,
}

/// Elements that have bytes.
pub(crate) trait Plain: Element {
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
    /// Any value, often an awkward one.
    fn any() -> BoxedStrategy<Self>;
}

macro_rules! plain {
    ($($type:ty: $any:expr;)*) => {$(
        impl Plain for $type {
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }

            fn of(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }

            fn any() -> BoxedStrategy<Self> {
                $any.boxed()
            }
        }
    )*};
}

plain! {
    u8: any::<u8>();
    i32: any::<i32>().prop_flat_map(|value| (0u32..32).prop_map(move |shift| value >> shift));
    u32: any::<u32>().prop_flat_map(|value| (0u32..32).prop_map(move |shift| value >> shift));
    i64: any::<i64>().prop_flat_map(|value| (0u32..64).prop_map(move |shift| value >> shift));
    u64: any::<u64>().prop_flat_map(|value| (0u32..64).prop_map(move |shift| value >> shift));
    f16: any::<u16>().prop_map(f16::from_bits);
    bf16: any::<u16>().prop_map(bf16::from_bits);
    f32: prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        any::<u16>().prop_map(|bits| f16::from_bits(bits).to_f32()),
        any::<i32>().prop_map(|value| value as f32),
        (any::<u16>(), 0u32..3).prop_map(|(high, low)| f32::from_bits((u32::from(high) << 16) + 0x7FFF + low)),
    ];
    f64: prop_oneof![
        any::<u64>().prop_map(f64::from_bits),
        any::<u32>().prop_map(|bits| f64::from(f32::from_bits(bits))),
        any::<i64>().prop_map(|value| value as f64),
        any::<u16>().prop_map(|bits| f16::from_bits(bits).to_f64().next_up()),
    ];
}

fn open(spec: &str) -> Device {
    aquifer::open(spec).unwrap()
}

/// The byte of guards.
const GUARD: u8 = 0xA5;
/// Bytes as elements of a dtype.
pub(crate) fn bytes_as(bytes: &Buffer<u8, impl Handle>, dtype: DType) -> Operand<'_> {
    Operand::new(bytes.storage(), bytes.ptr(), bytes.bytes(), dtype)
}

/// Guard elements after memory, and at least before it.
const GUARDS: u64 = 8;

/// Memory between guards.
pub(crate) struct Guarded<T: Plain> {
    whole: Buffer<T>,
    pub(crate) part: Buffer<T>,
    start: u64,
}

impl Bench {
    /// A new simulated device, or exclusive use of the named one, so that counts and captures
    /// belong to one test. A test must not hold two of these.
    pub(crate) fn new() -> Bench {
        let Ok(spec) = std::env::var("AQUIFER_TEST_DEVICE") else { return Bench::on(open("sim:2GiB")) };
        /// Opened once: otherwise each case on a GPU would create a context and compile all
        /// modules.
        static SHARED: OnceLock<(Device, Kernels)> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        let access = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (device, kernels) = SHARED.get_or_init(|| {
            let device = open(&spec);
            let kernels = Kernels::load(&device).unwrap();
            (device, kernels)
        });
        // Memory of the previous test must not be released during this one.
        device.settle();
        Bench::with(device.clone(), kernels.clone(), Some(access))
    }

    pub(crate) fn on(device: Device) -> Bench {
        let kernels = Kernels::load(&device).unwrap();
        Bench::with(device, kernels, None)
    }

    fn with(device: Device, kernels: Kernels, access: Option<MutexGuard<'static, ()>>) -> Bench {
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.stream().unwrap();
        Bench { device, allocator, kernels, stream, _access: access }
    }

    pub(crate) fn is_simulated(&self) -> bool {
        self.device.info().is_virtual
    }

    pub(crate) fn alloc<T: Copy>(&self, len: u64) -> Buffer<T> {
        self.allocator.alloc(usize::try_from(len).unwrap(), &self.stream).unwrap()
    }

    /// Elements in new memory.
    pub(crate) fn upload<T: Plain>(&self, elements: &[T]) -> Buffer<T> {
        let buffer = self.alloc(elements.len() as u64);
        self.put(&buffer, elements);
        buffer
    }

    /// Elements between guards, `shift` elements after the start of memory.
    pub(crate) fn guarded<T: Plain>(&self, elements: &[T], shift: u64) -> Guarded<T> {
        let (len, start) = (elements.len() as u64, GUARDS + shift);
        let whole = self.alloc::<T>(start + len + GUARDS);
        let guard = T::of(&vec![GUARD; size_of::<T>()]);
        self.put(&whole, &vec![guard; whole.len()]);
        let part = whole.slice(start as usize..(start + len) as usize).share();
        self.put(&part, elements);
        Guarded { whole, part, start }
    }

    /// The elements between the guards, which must be intact.
    pub(crate) fn between<T: Plain>(&self, guarded: &Guarded<T>) -> Vec<T> {
        let all = self.download_bytes(&guarded.whole);
        let (start, len) = (guarded.start as usize * size_of::<T>(), guarded.part.bytes() as usize);
        let outside = all[..start].iter().chain(&all[start + len..]);
        assert!(outside.copied().all(|byte| byte == GUARD), "memory beside the operand was written");
        all[start..start + len].chunks_exact(size_of::<T>()).map(T::of).collect()
    }

    pub(crate) fn put<T: Plain>(&self, buffer: &Buffer<T>, elements: &[T]) {
        let bytes: Vec<u8> = elements.iter().flat_map(|&element| element.bytes()).collect();
        let _access = AccessGuard::acquire(&self.stream, &[(buffer.storage(), AccessKind::Write)]).unwrap();
        self.stream.upload_blocking(buffer.ptr(), &bytes).unwrap();
    }

    pub(crate) fn download<T: Plain>(&self, buffer: &Buffer<T>) -> Vec<T> {
        self.download_bytes(buffer).chunks_exact(size_of::<T>()).map(T::of).collect()
    }

    pub(crate) fn download_bytes<T: Copy>(&self, buffer: &Buffer<T>) -> Vec<u8> {
        let mut bytes = vec![0; buffer.bytes() as usize];
        let _access = AccessGuard::acquire(&self.stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
        self.stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
        bytes
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Take all of them, so that none is reported by the next test.
        let found: Vec<String> = std::iter::from_fn(|| self.device.driver().take_violation()).collect();
        if !std::thread::panicking() {
            assert!(found.is_empty(), "{found:?}");
        }
    }
}

/// Lengths of operands: 0, 1, odd ones, and more than a block or a piece of host work.
pub(crate) fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0usize..70, 2 => 1000usize..1100, 1 => 65_500usize..65_600]
}

/// Elements of some length: a few arbitrary ones, repeated.
pub(crate) fn elements<T: Plain>(len: usize) -> impl Strategy<Value = Vec<T>> {
    proptest::collection::vec(T::any(), 1..97).prop_map(move |some| some.into_iter().cycle().take(len).collect())
}

/// Whether results are equal bit for bit, or both NaN.
#[track_caller]
pub(crate) fn assert_agree<T: Plain + Debug>(is: &[T], should: &[T], is_nan: impl Fn(T) -> bool) {
    assert_eq!(is.len(), should.len());
    for (index, (&is, &should)) in is.iter().zip(should).enumerate() {
        let agrees = is.bytes() == should.bytes() || (is_nan(is) && is_nan(should));
        assert!(agrees, "element {index} is {is:?} and should be {should:?}");
    }
}
