//! The arguments of a launch, checked against the kernel's declaration.

use std::mem::discriminant;

use aquifer_device::{AccessKind, AccessRange, Code, DeviceError, DevicePtr, KernelArg, Operation, Result};

/// The type of a kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelParam {
    /// A device address, 8 bytes.
    Ptr,
    /// A 32-bit unsigned integer.
    U32,
    /// A 64-bit unsigned integer.
    U64,
    /// A 32-bit float.
    F32,
    /// A 64-bit float.
    F64,
}

impl KernelParam {
    /// Its size in bytes, as the driver reads it.
    pub const fn bytes(self) -> usize {
        match self {
            KernelParam::U32 | KernelParam::F32 => 4,
            KernelParam::Ptr | KernelParam::U64 | KernelParam::F64 => 8,
        }
    }

    /// The argument in `bytes`, little-endian; 4-byte parameters ignore the last four bytes.
    pub fn decode(self, bytes: [u8; 8]) -> KernelArg {
        let [a, b, c, d, ..] = bytes;
        match self {
            KernelParam::Ptr => KernelArg::Ptr(DevicePtr(u64::from_le_bytes(bytes))),
            KernelParam::U32 => KernelArg::U32(u32::from_le_bytes([a, b, c, d])),
            KernelParam::U64 => KernelArg::U64(u64::from_le_bytes(bytes)),
            KernelParam::F32 => KernelArg::F32(f32::from_le_bytes([a, b, c, d])),
            KernelParam::F64 => KernelArg::F64(f64::from_le_bytes(bytes)),
        }
    }

    /// Whether an argument is of this type.
    pub fn accepts(self, arg: &KernelArg) -> bool {
        discriminant(&self.decode([0; 8])) == discriminant(arg)
    }
}

/// Why arguments are invalid.
pub(crate) fn refuse(kernel: &str, detail: impl AsRef<str>) -> DeviceError {
    DeviceError::refused(Operation::Launch, Code::INVALID_VALUE)
        .with_detail(format!("kernel {kernel}: {}", detail.as_ref()))
}

/// Arguments, taken one after the other.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    kernel: &'a str,
    left: std::slice::Iter<'a, KernelArg>,
}

macro_rules! takers {
    ($($name:ident: $variant:ident => $type:ty,)*) => {$(
        pub(crate) fn $name(&mut self) -> Result<$type> {
            match self.left.next() {
                Some(&KernelArg::$variant(value)) => Ok(value),
                other => Err(refuse(self.kernel, format!("argument {other:?} is no {}", stringify!($variant)))),
            }
        }
    )*};
}

impl<'a> Args<'a> {
    /// The arguments of a kernel, if their number and types are those that it declares.
    pub(crate) fn checked(kernel: &'a str, params: &[KernelParam], args: &'a [KernelArg]) -> Result<Args<'a>> {
        if params.len() != args.len() {
            let (declared, given) = (params.len(), args.len());
            return Err(refuse(kernel, format!("{given} arguments given, {declared} declared")));
        }
        match params.iter().zip(args).position(|(param, arg)| !param.accepts(arg)) {
            None => Ok(Args { kernel, left: args.iter() }),
            Some(wrong) => {
                let (param, arg) = (params[wrong], args[wrong]);
                Err(refuse(kernel, format!("argument {wrong} is {arg:?} where a {param:?} is declared")))
            }
        }
    }

    takers! {
        ptr: Ptr => DevicePtr,
        u64: U64 => u64,
        f32: F32 => f32,
        f64: F64 => f64,
    }
}

/// The ranges that a kernel accesses, with checked lengths.
#[derive(Debug)]
pub(crate) struct Ranges<'a> {
    kernel: &'a str,
    accesses: Vec<AccessRange>,
}

impl<'a> Ranges<'a> {
    pub(crate) fn of(kernel: &'a str) -> Ranges<'a> {
        Ranges { kernel, accesses: Vec::with_capacity(3) }
    }

    /// `count` elements of `size` bytes from `ptr` on, all of them below the last address.
    pub(crate) fn add(mut self, kind: AccessKind, ptr: DevicePtr, count: u64, size: u64) -> Result<Self> {
        let bytes = count.checked_mul(size).filter(|&bytes| ptr.0.checked_add(bytes).is_some());
        let Some(bytes) = bytes else {
            return Err(refuse(
                self.kernel,
                format!("{count} elements of {size} bytes at {ptr} go past the last address"),
            ));
        };
        if bytes > 0 {
            self.accesses.push(AccessRange { ptr, bytes, kind });
        }
        Ok(self)
    }

    pub(crate) fn read(self, ptr: DevicePtr, count: u64, size: u64) -> Result<Self> {
        self.add(AccessKind::Read, ptr, count, size)
    }

    pub(crate) fn write(self, ptr: DevicePtr, count: u64, size: u64) -> Result<Self> {
        self.add(AccessKind::Write, ptr, count, size)
    }

    pub(crate) fn done(self) -> Vec<AccessRange> {
        self.accesses
    }
}
