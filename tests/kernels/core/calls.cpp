// Runs the functions of csrc/ that another process asks for, with memory sent along: so that its tests run on this processor's kernels, or on an
// emulated one's. Linked with csrc/ and with a table of its functions; no torch, no Python.
//
// Standard input is one call after another (little endian, integers of 8 bytes):
//   length and bytes of the name; the number of buffers; for each its place in a cache line, its size, its bytes;
//   the number of pointers that lie inside buffers; for each: buffer, offset, the buffer it points into, offset there;
//   the number of whole-number arguments; for each: buffer (-1: none) and value, an offset there or the number itself; the number of float arguments
//   and each, as an 8-byte integer's low half.
// Standard output: the function's code, then the bytes of all buffers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Entry {
  const char* name;
  void (*function)();
};
extern const Entry kTable[];  // ends with a null name

namespace {

void read(void* to, size_t n) {
  if (n && std::fread(to, 1, n, stdin) != n) std::exit(2);
}
int64_t number() {
  int64_t x;
  read(&x, 8);
  return x;
}
void write(const void* from, size_t n) {
  if (n && std::fwrite(from, 1, n, stdout) != n) std::exit(3);
}

struct Buffer {
  char* base;
  size_t size;
};

// Whole numbers go to registers and then to 8-byte places on the stack, floats to registers of their own, in System V's convention and in Arm's:
// arguments beyond those that a function has do no harm. More than four floats would need another line.
constexpr int kMost = 32;
int call(void (*function)(), const int64_t* i, const float* f) {
  using Any = int (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                      int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                      int64_t, int64_t, float, float, float, float);
  return reinterpret_cast<Any>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16], i[17],
                                         i[18], i[19], i[20], i[21], i[22], i[23], i[24], i[25], i[26], i[27], i[28], i[29], i[30], i[31], f[0], f[1], f[2],
                                         f[3]);
}

}  // namespace

int main() {
  for (;;) {
    int64_t length;
    if (std::fread(&length, 1, 8, stdin) != 8) return 0;
    std::string name(static_cast<size_t>(length), ' ');
    read(&name[0], name.size());
    const Entry* entry = kTable;
    while (entry->name && name != entry->name) entry++;
    if (!entry->name) return std::fprintf(stderr, "no function %s\n", name.c_str()), 4;
    std::vector<Buffer> buffers(static_cast<size_t>(number()));
    std::vector<void*> owned;
    for (Buffer& buffer : buffers) {
      const size_t shift = size_t(number());
      buffer.size = size_t(number());
      char* memory = static_cast<char*>(std::aligned_alloc(64, (shift + buffer.size + 127) / 64 * 64));
      if (!memory) return 5;
      owned.push_back(memory);
      buffer.base = memory + shift;
      read(buffer.base, buffer.size);
    }
    for (int64_t n = number(); n > 0; n--) {
      const int64_t in = number(), at = number(), to = number(), offset = number();
      char* pointer = buffers[size_t(to)].base + offset;
      std::memcpy(buffers[size_t(in)].base + at, &pointer, 8);
    }
    int64_t whole[kMost] = {};
    float floats[4] = {};
    const int64_t count = number();
    if (count > kMost) return 6;
    for (int64_t i = 0; i < count; i++) {
      const int64_t buffer = number(), value = number();
      whole[i] = buffer < 0 ? value : reinterpret_cast<int64_t>(buffers[size_t(buffer)].base + value);
    }
    const int64_t reals = number();
    if (reals > 4) return 6;
    for (int64_t i = 0; i < reals; i++) {
      const int64_t bits = number();
      std::memcpy(&floats[i], &bits, 4);
    }
    const int64_t code = call(entry->function, whole, floats);
    write(&code, 8);
    for (const Buffer& buffer : buffers) write(buffer.base, buffer.size);
    std::fflush(stdout);
    for (void* memory : owned) std::free(memory);
  }
}
