/* Holds every packet between two network namespaces for some milliseconds, where the kernel has no netem.
 *
 *   delay MILLISECONDS NAMESPACE NAMESPACE
 *
 * Makes a TUN device `delay0` in each of them. One child for each direction reads packets into a ring with the time
 * at which they are due, and writes them on then. Prints "ready", and ends when its standard input does.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 16384, LARGEST = 2048 };

struct packet {
    int64_t due;
    int size;
    char bytes[LARGEST];
};

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int device_in(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    int net = open(path, O_RDONLY | O_CLOEXEC);
    if (net < 0 || setns(net, CLONE_NEWNET) != 0)
        err(1, "%s", path);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq wish = {.ifr_flags = IFF_TUN | IFF_NO_PI, .ifr_name = "delay0"};
    if (device < 0 || ioctl(device, TUNSETIFF, &wish) != 0)
        err(1, "TUN device in %s", name);
    return device;
}

static void carry(int from, int to, int64_t delay)
{
    struct packet *ring = calloc(ROOM, sizeof *ring);
    unsigned first = 0, next = 0;
    if (!ring)
        err(1, "ring");
    for (;;) {
        struct pollfd ear = {from, next - first < ROOM ? POLLIN : 0, 0};
        struct timespec pause, *wait = NULL;
        if (first != next) {
            int64_t left = ring[first % ROOM].due - now();
            left = left < 0 ? 0 : left;
            pause.tv_sec = left / 1000000000, pause.tv_nsec = left % 1000000000;
            wait = &pause;
        }
        ppoll(&ear, 1, wait, NULL);
        while (next - first < ROOM) {
            struct packet *one = &ring[next % ROOM];
            one->size = (int)read(from, one->bytes, LARGEST);
            if (one->size <= 0)
                break;
            one->due = now() + delay;
            next++;
        }
        while (first != next && ring[first % ROOM].due <= now()) {
            struct packet *one = &ring[first++ % ROOM];
            /* A full queue loses the packet, as on any way. */
            if (write(to, one->bytes, one->size) < 0)
                continue;
        }
    }
}

int main(int count, char **words)
{
    if (count != 4)
        errx(2, "delay MILLISECONDS NAMESPACE NAMESPACE");
    int64_t delay = (int64_t)(atof(words[1]) * 1e6);
    int ends[2] = {device_in(words[2]), device_in(words[3])};
    for (int way = 0; way < 2; way++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            prctl(PR_SET_TIMERSLACK, 1);
            carry(ends[way], ends[1 - way], delay);
        }
    puts("ready");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}
